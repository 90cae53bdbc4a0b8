"""Reading a kit's events.log, which events.py writes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from medsilo.core.text import plain
from medsilo.runs.events import NAME, columns_of, is_of, read

POLL = 0.5  # seconds between two looks for new lines


def follow(kit: Path, of: str = "") -> Iterator[str]:
    """Yield the lines of a kit that are written from now on, without end."""
    path = kit / NAME
    file = path.open(encoding="utf-8", errors="replace") if path.is_file() else None
    if file:
        file.seek(0, os.SEEK_END)
    while True:
        for line in file or ():
            if is_of(line, of):
                yield line.rstrip("\n")
        if path.is_file() and (file is None or os.fstat(file.fileno()).st_ino != path.stat().st_ino):
            if file:
                yield from (line.rstrip("\n") for line in file if is_of(line, of))  # the last of the one set aside
                file.close()
            file = path.open(encoding="utf-8", errors="replace")
            continue
        time.sleep(POLL)


def connected(kit: Path) -> dict[str, bool]:
    """Return who was connected to a server or a hospital, and whether they are, by the kit's last lines."""
    here = dict[str, bool]()
    for columns in map(columns_of, read(kit)):
        if columns is None:
            continue
        _, _, what, who, study, *_ = columns
        if what == "started":
            here = dict.fromkeys(here, False)
        elif study == "-" and who != "-" and what in ("joined", "back", "away"):
            here[who] = what != "away"
    return here


def jobs(kit: Path) -> dict[str, str]:
    """Return the last job of each study in a kit's lines."""
    return {columns[4]: columns[5] for columns in map(columns_of, read(kit)) if columns}


def shown(line: str) -> str:
    """Return a line as people read it; what is damaged stays one line."""
    columns = columns_of(line)
    if columns is None:
        return plain(line)
    at, level, what, who, study, job, text = map(plain, columns)
    of = " ".join(name for name in (who, study, job) if name != "-")
    return f"{at}  {level:<7}  {what:<8}  {f'{of}: ' if of else ''}{text}"
