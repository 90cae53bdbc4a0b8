"""Sign and verify a kit's events.log, in which each line contains the hash of the previous line.

A key of the kit signs the hash of the log's last line. Therefore, `EventChain.check` detects if somebody later changed,
removed, added or swapped lines before the signed line. It does not detect that lines after the last signature were
removed, and it can't detect changes by somebody who has the key.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from medsilo.core.errors import MedsiloError, TemporaryRefusal
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.runs.events import COLUMNS, KEPT, NAME, alone, files, hash_of, whole_lines
from medsilo.site.accepted_settings import moment
from medsilo.site.kit import KitFiles
from medsilo.site.signed import read_of_kit, write_signed

HEAD = "events.head.json"  # name of the kit's file with the signed hashes
EVERY = 3600.0  # seconds between two signatures
REMEDY = "find out who changed it; 'medsilo check --kit KIT --accept' lets the kit sign it as it is now"
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Head(Section):
    first: Hash  # hash of the oldest line that was in the log when the log was signed
    last: Hash
    lines: int = Field(ge=1)
    time: int


@dataclass(frozen=True)
class _Line:
    text: bytes
    newest: bool  # False if the line is in a rotated log file

    @property
    def hash(self) -> str:
        return hash_of(self.text)

    @property
    def before(self) -> str | None:
        """The hash of the previous line; None if the line contains no hash."""
        columns = self.text.decode("utf-8", "replace").split("\t")
        return columns[COLUMNS] if len(columns) == COLUMNS + 1 else None

    @property
    def when(self) -> str:
        return plain(self.text.decode("utf-8", "replace").partition("\t")[0], 40)


class EventChain:
    def __init__(self, kit: KitFiles) -> None:
        self.kit, self.head, self._key = kit.kit, kit.kit / HEAD, kit
        # When this process last signed the log, and the hash of the log file's first line at that time
        self._signed: tuple[float, str] | None = None
        # True if the log has neither hashes nor a signature yet; hashes without a signature mean that somebody removed
        # it
        self._begins = not self.head.exists() and not any(line.before for line in _lines(self.kit))

    def check(self) -> str:
        """Verify the log, and return a description of the log's last signature. Raises MedsiloError if signed lines
        were changed.
        """
        with alone(self.kit):
            head = self._checked(_lines(self.kit))
        return f"events.log is whole; its lines up to {moment(head.time)} are signed" if head else ""

    def sign(self, accept: bool = False) -> None:
        """Sign the log. Raises MedsiloError if signed lines were changed, unless `accept` is true."""
        with alone(self.kit):
            lines = _lines(self.kit)
            if not (accept or self._begins):
                self._checked(lines)
            if not lines:
                return
            # sync the log to disk first, because signed lines must survive a power failure
            for path in filter(Path.exists, files(self.kit)):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            now, begin = int(time.time()), _begin(self.kit)
            head = _Head(first=lines[0].hash, last=lines[-1].hash, lines=len(lines), time=now)
            write_signed(self.head, head, self._key.key_for("events"))
        self._signed, self._begins = (time.monotonic(), begin), False

    def sign_in_time(self) -> None:
        """Sign the log once an hour, and after each rotation, because a rotation may delete signed lines."""
        then, first = self._signed or (-EVERY, "")
        if time.monotonic() - then >= EVERY or _begin(self.kit) not in ("", first):
            self.sign()

    def _checked(self, lines: list[_Line]) -> _Head | None:
        """Raise MedsiloError if signed lines were changed. Return the signed head, or None for a log without hashes."""
        if not self.head.exists():
            if any(line.before for line in lines):
                raise MedsiloError(f"{NAME} is not signed: {HEAD} is missing")
            return None
        try:
            head = read_of_kit(self.head, _Head, self._key, "events")
        except TemporaryRefusal:
            raise
        except MedsiloError as error:
            told = f"{HEAD}, which says what was signed of {NAME}, is damaged or not signed by this kit's key"
            raise MedsiloError(told, str(error)) from error
        before = None
        for line in lines:
            if before and (line.before != before.hash if line.before else before.before):
                raise MedsiloError(
                    f"{NAME} was changed: the line of {line.when} does not contain the hash of the line before it"
                )
            before = line
        hashes = [line.hash for line in lines]
        if head.last not in hashes:
            raise MedsiloError(f"{NAME} was changed: the line that was signed at {moment(head.time)} is missing")
        set_aside = not lines[hashes.index(head.last)].newest and (self.kit / f"{NAME}.{KEPT}").exists()
        if hashes[0] != head.first and not set_aside:
            raise MedsiloError(f"{NAME} was changed: its oldest lines, which were signed, are missing")
        return head


def _lines(kit: Path) -> list[_Line]:
    found = (path for path in files(kit) if path.is_file())
    return [_Line(text, path.name == NAME) for path in found for text in whole_lines(path.read_bytes())]


def _begin(kit: Path) -> str:
    path = kit / NAME
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        line = file.readline()
    return hash_of(line[:-1]) if line.endswith(b"\n") else ""
