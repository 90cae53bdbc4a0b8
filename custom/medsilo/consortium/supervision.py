"""Supervision of a kit: a loop that starts it again, and a systemd unit that runs the loop."""

import shutil
from pathlib import Path

from medsilo.core.files import write_text

HERE = Path(__file__).parent
RUN, SERVICE, GUARD = "keep-running.sh", "medsilo.service", "site_guard.py"  # files beside this one


def supervise(kit: Path, role: str, *writes: Path) -> None:
    """Write loop and unit into the kit of a server, relay or hospital. writes: what it writes beside the kit."""
    shutil.copyfile(HERE / RUN, kit / RUN)
    (kit / RUN).chmod(0o700)
    unit = (HERE / SERVICE).read_text("utf-8")
    write_text(kit / SERVICE, unit.format(name=kit.name, role=role, writes=" ".join(map(str, writes))))


def guard(kit: Path) -> None:
    """Put into a hospital's kit what refuses jobs where medsilo is missing."""
    (kit / "local/custom").mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(HERE / GUARD, kit / "local/custom" / GUARD)
