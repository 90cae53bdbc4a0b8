"""What keeps a kit running: a loop that starts it again, and a systemd unit that runs the loop."""

import shutil
from pathlib import Path

from medsilo.core.files import write_text

PLACE, PROGRAMS = (
    "/srv/medsilo",
    "/opt/medsilo/bin",
)  # where units expect kits and the environment; a drop-in changes it
HERE = Path(__file__).parent
RUN, SERVICE, GUARD = "keep-running.sh", "medsilo.service", "medsilo_guard.py"  # files beside this one


def supervise(kit: Path, role: str, *writes: Path) -> None:
    """Write loop and unit into the kit of a server, relay or hospital. writes: what it writes beside the kit."""
    shutil.copyfile(HERE / RUN, kit / RUN)
    (kit / RUN).chmod(0o700)
    paths = " ".join([f"{PLACE}/{kit.name}", *map(str, writes)])
    unit = (HERE / SERVICE).read_text("utf-8")
    write_text(kit / SERVICE, unit.format(place=PLACE, programs=PROGRAMS, name=kit.name, role=role, writes=paths))


def guard(kit: Path) -> None:
    """Put into a hospital's kit what refuses jobs where medsilo is missing."""
    (kit / "local/custom").mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(HERE / GUARD, kit / "local/custom" / GUARD)
