"""Reading a kit's events.log, which events.py writes."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from medsilo.core.text import plain
from medsilo.runs.events import KEPT, NAME

POLL = 0.5  # seconds between two looks for new lines
COLUMNS = 7
RUNNING, LAST = ("began", "resumed"), ("ended", "failed")  # a job, and the last words of one


def read(kit: Path, of: str = "") -> Iterator[str]:
    """Yield the lines of a kit, the oldest first. of: the study, or the job, that they are of."""
    for path in (*(kit / f"{NAME}.{number}" for number in range(KEPT, 0, -1)), kit / NAME):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from (line.rstrip("\n") for line in file if is_of(line, of))


def fates(kit: Path) -> dict[str, str]:
    """Return by job whether the last that was written of it is that it runs, or has ended."""
    found = (columns for columns in map(columns_of, read(kit)) if columns and columns[2] in RUNNING + LAST)
    return {columns[5]: columns[2] for columns in found}


def columns_of(line: str) -> list[str] | None:
    """Return a line's columns; None of one that is damaged."""
    columns = line.rstrip("\n").split("\t", COLUMNS - 1)
    return columns if len(columns) == COLUMNS else None


def is_of(line: str, of: str) -> bool:
    """Return whether a line is of a study or a job."""
    return not of or of in line.split("\t", COLUMNS - 1)[4:6]


def follow(kit: Path, of: str = "", after: str | None = None) -> Iterator[str]:
    """Yield the lines of a kit that are written from now on, or behind the line `after`, without end."""
    path = kit / NAME
    file = _other(path, None)
    if file:
        file.seek(0, os.SEEK_END)
    missed = [] if after is None else since(kit, after)  # may hold lines that the open file will bring, too
    yield from (line for line in missed if is_of(line, of))
    while True:
        new = _other(path, file)  # before the last lines of the one set aside are read
        lines = (line.rstrip("\n") for line in file or ())
        yield from (line for line in lines if is_of(line, of) and line not in missed)
        if new is None:
            time.sleep(POLL)
        else:
            if file:
                file.close()
            file = new


def since(kit: Path, line: str) -> list[str]:
    """Return the lines of a kit that follow a line; if it is there no more, those of a later time."""
    lines = list(read(kit))
    if line in lines:
        return lines[len(lines) - lines[::-1].index(line) :]
    return [other for other in lines if other.partition("\t")[0] > line.partition("\t")[0]]


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
