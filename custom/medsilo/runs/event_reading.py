"""Read a kit's events.log, which events.py writes."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from medsilo.core.text import plain
from medsilo.runs.events import COLUMNS, NAME, files

POLL = 0.5  # seconds between two checks for new lines
# kinds of events: a job is running, and a job has ended
RUNNING, LAST = ("began", "resumed"), ("ended", "failed")


def read(kit: Path, of: str = "") -> Iterator[str]:
    """Yield the lines of a kit's log, the oldest line first.

    Args:
        of: a study or job; lines about other studies or jobs are skipped
    """
    for path in files(kit):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from (line.rstrip("\n") for line in file if is_of(line, of))


def fates(kit: Path) -> dict[str, str]:
    """Return, for each job, whether it last began, resumed, ended or failed."""
    found = (columns for columns in map(columns_of, read(kit)) if columns and columns[2] in RUNNING + LAST)
    return {columns[5]: columns[2] for columns in found}


def last_of_jobs(kit: Path) -> dict[str, tuple[str, bool]]:
    """For each job, return the kind of its last event, and whether somebody must act on it.

    The kind "waits" means that medsilo will restart the job's study automatically.
    """
    found = (columns for columns in map(columns_of, read(kit)) if columns and columns[3] == "-")
    return {
        columns[5]: (columns[2], columns[1] == "WARNING")
        for columns in found
        if columns[2] in (*RUNNING, *LAST, "waits")
    }


def last_words(kit: Path, job: str) -> str:
    """Return the logged reason why a study's job failed, or an empty string if no failure is logged."""
    found = [columns for columns in map(columns_of, read(kit, job)) if columns and columns[2] in LAST]
    return found[-1][6] if found and found[-1][2] == "failed" else ""


def columns_of(line: str) -> list[str] | None:
    """Return the columns of a line of the log, without the hash of the previous line; None for a damaged line."""
    columns = line.rstrip("\n").split("\t")
    return columns[:COLUMNS] if len(columns) in (COLUMNS, COLUMNS + 1) else None


def is_of(line: str, of: str) -> bool:
    return not of or of in line.split("\t", COLUMNS - 1)[4:6]


def follow(kit: Path, of: str = "", after: str | None = None) -> Iterator[str]:
    """Yield each new line of a kit's log, at most half a second after it was written; the iterator never ends.

    Args:
        after: an earlier line, after which all existing lines are yielded first
    """
    path = kit / NAME
    file = _other(path, None)
    if file:
        file.seek(0, os.SEEK_END)
    # the loop below must not yield these lines a second time
    missed = [] if after is None else since(kit, after)
    yield from (line for line in missed if is_of(line, of))
    while True:
        # look for a new log file before reading the last lines of the previous file, so that a rotation loses no lines
        new = _other(path, file)
        lines = (line.rstrip("\n") for line in file or ())
        yield from (line for line in lines if is_of(line, of) and line not in missed)
        if new is None:
            time.sleep(POLL)
        else:
            if file:
                file.close()
            file = new


def since(kit: Path, line: str) -> list[str]:
    """Return the log's lines after the given line. If the given line is no longer in the log, return all lines with a
    later time.
    """
    lines = list(read(kit))
    if line in lines:
        return lines[len(lines) - lines[::-1].index(line) :]
    return [other for other in lines if other.partition("\t")[0] > line.partition("\t")[0]]


def _other(path: Path, file: TextIO | None) -> TextIO | None:
    """Open the log file if `file` is not, or no longer, the current log; otherwise return None."""
    with suppress(OSError):  # the log file is missing, or another process is rotating it
        now = path.stat()
        if not file or now.st_ino != os.fstat(file.fileno()).st_ino or now.st_size < os.lseek(file.fileno(), 0, 1):
            return path.open(encoding="utf-8", errors="replace")
    return None


def connected(kit: Path) -> dict[str, bool]:
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
    return {columns[4]: columns[5] for columns in map(columns_of, read(kit)) if columns}


def shown(line: str) -> str:
    """Format a line of the log for people; a damaged line stays unchanged."""
    columns = columns_of(line)
    if columns is None:
        return plain(line)
    at, level, what, who, study, job, text = map(plain, columns)
    of = " ".join(name for name in (who, study, job) if name != "-")
    return f"{at}  {level:<7}  {what:<8}  {f'{of}: ' if of else ''}{text}"
