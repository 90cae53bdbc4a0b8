import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medsilo.cli import Commands, _by_options, _program
from medsilo.site.signed import fingerprint


def parsed(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    ctx = _program().make_context("medsilo", _by_options(arguments))
    while isinstance(ctx.command, Commands):
        name, chosen, rest = ctx.command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        ctx = chosen.make_context(name, rest, parent=ctx)
    return ctx.command_path.removeprefix("medsilo "), dict(ctx.params)


def joined(text: str) -> str:
    return re.sub(r" *\\\n *", " ", text)


def processor_seconds(arguments: Sequence[str]) -> float:
    """Run a command three times, and return the shortest processor time in seconds; each run must succeed."""
    seconds = []
    for _ in range(3):
        before = sum(os.times()[2:4])
        subprocess.run([sys.executable, "-m", "medsilo", *arguments], check=True, stdout=subprocess.DEVNULL)
        seconds.append(sum(os.times()[2:4]) - before)
    return min(seconds)


def lead_of(release: Path | str) -> str:
    return fingerprint(json.loads((Path(release) / "release.json").read_text("utf-8"))["key"])
