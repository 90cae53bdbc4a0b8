"""Reading a kit's events.log, which events.py writes."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from medsilo.core.text import plain
from medsilo.runs.events import NAME, columns_of, is_of, read

POLL = 0.5  # seconds between two looks for new lines


def follow(kit: Path, of: str = "") -> Iterator[str]:
    """Yield the lines of a kit that are written from now on, without end."""
    path = kit / NAME
    file = _other(path, None)
    if file:
        file.seek(0, os.SEEK_END)
    while True:
        new = _other(path, file)  # before the last lines of the one set aside are read
        yield from (line.rstrip("\n") for line in file or () if is_of(line, of))
        if new is None:
            time.sleep(POLL)
        else:
            if file:
                file.close()
            file = new


def _other(path: Path, file: TextIO | None) -> TextIO | None:
    """Return the file of this name, if it is another than the open one, or was emptied; None if it can't be read."""
    with suppress(OSError):  # it is not there, or is being set aside
        now = path.stat()
        if not file or now.st_ino != os.fstat(file.fileno()).st_ino or now.st_size < os.lseek(file.fileno(), 0, 1):
            return path.open(encoding="utf-8", errors="replace")
    return None


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
