"""Write events.log in a server's or hospital's kit: connections, and beginnings, ends and failures of studies.

Several processes of a kit write events.log under a lock. The columns of a line, separated by tabs, are time, level,
kind, party, study, job, text, and the hash of the previous line. The module event_chain.py signs and verifies the
hashes.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from medsilo.core.files import FILE, read_bounded, write_passing
from medsilo.core.section import Section
from medsilo.core.text import counted, plain

NAME = "events.log"
REPEATED = ".events.repeated.json"  # name of the kit's file that counts repeated rejections
COLUMNS = 7  # number of columns of a line, not counting the hash
LARGEST, KEPT = 1 << 20, 4  # size in bytes at which the log is rotated, and number of rotated files
WAIT = 5.0  # seconds to wait for the lock of the log file
TEXT = 500  # limit on the bytes of an event's text
NOT_APPROVED = "has not approved"  # appears in the reason if a hospital rejects a plan that it has not approved
SILENCE = 90.0  # seconds without a heartbeat until a hospital counts as disconnected
# after this many seconds, a repeated rejection counts as new, so that it gets its own line in the log
AGAIN = 3600.0
# seconds until a party's count of repeated rejections is first logged; the time doubles with each such line, up to
# AGAIN
OFTEN = 60.0
# Limits on the kinds of rejections of a party that get their own lines, and on the number of counted parties
MOST_KINDS, MOST_PARTIES = 20, 50
OTHERS = "others"  # further parties are counted together under this name
LARGEST_COUNTS = 1 << 20  # limit on the bytes of the file of counts
START = "0" * 64  # takes the place of the previous line's hash in the first line
What = Literal[
    "started",
    "joined",
    "slow",
    "away",
    "back",
    "refused",
    "began",
    "resumed",
    "waits",
    "ended",
    "failed",
    "certificate",
]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """An event for the log.

    Repeated rejections are only counted, so that no sender can fill the log.

    Args:
        by: for a rejection, the party whose request was rejected
    """

    what: What
    text: str
    who: str = ""
    study: str = ""
    job: str = ""
    needs_somebody: bool = False
    by: str = ""

    def line(self, at: float | None = None) -> str:
        moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
        level = "WARNING" if self.needs_somebody else "INFO"
        of = (plain(name, 80) or "-" for name in (self.who, self.study, self.job))
        return "\t".join((f"{moment:%Y-%m-%d %H:%M:%SZ}", level, self.what, *of, plain(self.text, TEXT)))


class _Party(Section):
    """The recent rejections of one party's requests."""

    kinds: dict[str, float] = Field({}, max_length=MOST_KINDS)  # time of the last log line, by kind of rejection
    more: int = Field(0, ge=0)  # number of rejections that are not logged yet
    since: float = 0.0  # time of the first rejection that has not been logged yet
    pause: float = OFTEN  # seconds from the first unlogged rejection until the number of rejections is logged
    who: Annotated[str, Field(max_length=500)] = ""  # party, study, job and text of the last rejection
    study: Annotated[str, Field(max_length=500)] = ""
    job: Annotated[str, Field(max_length=500)] = ""
    text: Annotated[str, Field(max_length=2000)] = ""


class _Repeated(Section):
    parties: dict[str, _Party] = Field({}, max_length=MOST_PARTIES + 1)

    @classmethod
    def read(cls, kit: Path) -> "_Repeated":
        """Read a kit's counts of repeated rejections; if the file is damaged, return no counts."""
        with suppress(OSError, ValueError, ValidationError):
            return cls.model_validate_json(read_bounded(kit / REPEATED, LARGEST_COUNTS))
        return cls()

    def due(self, now: float) -> "tuple[list[Event], _Repeated]":
        """Return events for the counts that are due to be logged, and the counts that remain."""
        told, kept = [], dict[str, _Party]()
        for name, one in self.parties.items():
            if one.more and not 0 <= now - one.since < one.pause:
                text = f"{counted(one.more, 'more refusal')} of {name} in {now - one.since:.0f} s; the last: {one.text}"
                told.append(Event("refused", text, one.who, one.study, one.job))
                one = one.model_copy(update={"more": 0, "pause": min(2 * one.pause, AGAIN)})
            kinds = {kind: at for kind, at in one.kinds.items() if 0 <= now - at < AGAIN}
            if kinds or one.more:
                kept[name] = one.model_copy(update={"kinds": kinds})
        return told, _Repeated(parties=kept)

    def take(self, event: Event, now: float) -> "tuple[bool, _Repeated]":
        """Count a rejection. Return the new counts, and True if the rejection needs its own line in the log."""
        name = plain(event.by, 80)
        name = name if name in self.parties or len(self.parties) < MOST_PARTIES else OTHERS
        one = self.parties.get(name, _Party())
        kind = hashlib.sha256(re.sub(r"[0-9a-f]{8,}|\d+", "", event.text).encode()).hexdigest()[:16]
        if is_new := kind not in one.kinds and len(one.kinds) < MOST_KINDS:
            one = one.model_copy(update={"kinds": {**one.kinds, kind: now}})
        else:
            last: dict[str, Any] = {key: plain(getattr(event, key), 120) for key in ("who", "study", "job")}
            last |= {"text": plain(event.text, TEXT), "more": one.more + 1, "since": one.since if one.more else now}
            one = one.model_copy(update=last)
        return is_new, _Repeated(parties={**self.parties, name: one})


def write(kit: Path, event: Event) -> None:
    """Add an event to a kit's events.log and to this process's ordinary log, without raising an error if events.log
    can't be written.
    """
    level = logging.WARNING if event.needs_somebody else logging.INFO
    LOG.log(level, "%s", " ".join(filter(None, (event.what, event.who and f"{event.who}:", plain(event.text, TEXT)))))
    _write(kit, event)


def tell_counts(kit: Path) -> None:
    if (kit / REPEATED).exists():
        _write(kit)


def _write(kit: Path, event: Event | None = None) -> None:
    now = time.time()
    try:
        with alone(kit):
            before = _Repeated.read(kit)
            told, after = before.due(now)
            if event and event.what == "refused" and event.by:
                is_new, after = after.take(event, now)
                event = event if is_new else None
            for one in (*told, *([event] if event else [])):
                _append(kit, one.line(now))
            if not after.parties:
                (kit / REPEATED).unlink(missing_ok=True)
            elif after != before:
                write_passing(kit / REPEATED, after.model_dump(mode="json"))
    except (OSError, Timeout) as error:
        text = event.text if event else "refusals were counted"
        LOG.warning("%s can't be written (%s): %s", NAME, type(error).__name__, text)


@contextmanager
def alone(kit: Path) -> Iterator[None]:
    """Within the context, lock a kit's events.log against other processes."""
    with FileLock(kit / f".{NAME}.lock", timeout=WAIT, mode=FILE):
        yield


def files(kit: Path) -> list[Path]:
    """Return the paths of a kit's event logs, oldest first."""
    return [*(kit / f"{NAME}.{number}" for number in range(KEPT, 0, -1)), kit / NAME]


def hash_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def whole_lines(content: bytes) -> list[bytes]:
    """Return the complete lines of a log file, without the incomplete line that a crash may leave at the end.

    Lines with zero bytes at the end are also left out, because a power failure can leave them in place of a line's
    beginning.
    """
    lines = content.split(b"\n")[:-1]
    while lines and b"\0" in lines[-1]:
        lines.pop()
    return lines


def _append(kit: Path, line: str) -> None:
    """Append a line that ends with the hash of the previous line; rotate the log if it is full."""
    path = kit / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE)
    with os.fdopen(descriptor, "rb+") as file:
        lines = whole_lines(file.read())
        end = sum(len(one) + 1 for one in lines)
        earlier = kit / f"{NAME}.1"
        if not lines and earlier.exists():
            lines = whole_lines(earlier.read_bytes())
        content = f"{line}\t{hash_of(lines[-1]) if lines else START}\n".encode()
        if not end or end + len(content) <= LARGEST:
            file.truncate(end)
            file.write(content)
            return
    places = files(kit)
    for older, newer in pairwise(places):
        if newer.exists():
            newer.replace(older)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE), "wb") as file:
        file.write(content)
