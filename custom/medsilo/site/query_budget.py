"""The memory of a hospital: its key, which patients' scores have left, and how many answers went to whom.

One folder per site, of this account alone. Its files are only ever added to, under a lock that all processes of this
hospital share. An answer is noted, on the disk, before it leaves: a process that dies in between has counted one answer
too many and never one too few.
"""

import hashlib
import hmac
import json
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import FILE, append_line, make_folder, write_text
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import DataPart, SiteSettings
from medsilo.tasks.sources import DataSource, Draw, Memory

PARTS: tuple[DataPart, ...] = ("train", "validation", "test")
KEY, ANSWERS, PATIENTS, PLACES = "key", "answers.jsonl", "patients.jsonl", "parts.jsonl"
LOCK, RUNNING = "book.lock", "running"
WAIT = 60.0  # seconds that another process may hold the lock
MARK = 16  # hexadecimal digits that stand for a patient
Marks = tuple[frozenset[str], frozenset[str]]  # of one part's patients, each with the number of its cases, and alone


@dataclass(frozen=True)
class LockedFolder:
    """A folder with the lock that all processes of a hospital share."""

    folder: Path
    lock: str  # the file's name
    wait: float  # seconds that another process may hold it
    holds: str  # for people: "this hospital's records"
    unless: str  # what does not happen when the folder cannot be used

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody else in as long as the block runs; raises MedsiloError where that is not to be had."""
        try:
            make_folder(self.folder)
            with FileLock(self.folder / self.lock, timeout=self.wait, mode=FILE):
                yield
        except Timeout as error:
            raise MedsiloError(f"another process holds {self.holds}; end it, or try again") from error
        except OSError as error:
            raise MedsiloError(
                f"{self.holds} cannot be used ({type(error).__name__}), so {self.unless}; check the folder of "
                f"'state_dir'",
                private=f"{self.folder}: {error}",
            ) from error


@dataclass(frozen=True)
class Requester:
    """The asker: a lead's study of a data set. A lead without a name is one like any other."""

    lead: str
    data: str
    study: str


@dataclass
class Count:
    """The known answers of one study, by part."""

    answered: Counter[str] = field(default_factory=Counter)
    planned: Counter[str] = field(default_factory=Counter)  # when it was let in


class QueryBudget:
    """A hospital's own memory of the studies that it answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locked = LockedFolder(folder, LOCK, WAIT, "this hospital's records", "nothing with scores leaves")

    # ------------------------------------------------------------------ the key
    def key(self) -> bytes:
        """Return this hospital's secret, which decides its split; made once."""
        with self._locked.alone():
            path = self.folder / KEY
            if not path.exists():
                write_text(path, secrets.token_hex(32))
            return self._read_key()

    @property
    def may_begin(self) -> bool:
        """Return whether what this account writes here is of the account that trains: that of the folder."""
        there = next((place for place in self.folder.parents if place.exists()), None)
        return there is not None and there.stat().st_uid == os.geteuid()

    def _read_key(self) -> bytes:
        try:
            return bytes.fromhex((self.folder / KEY).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise MedsiloError(
                f"this hospital's key cannot be read ({type(error).__name__}); give the account that trains the rights "
                "to the folder of 'state_dir'",
                private=str(self.folder / KEY),
            ) from error

    @property
    def has_key(self) -> bool:
        """Return whether a study was answered from here before."""
        return (self.folder / KEY).exists()

    def number(self, purpose: str) -> int:
        """Return a number in [0, 2**63) that only this hospital knows."""
        return int.from_bytes(hmac.digest(self.key(), purpose.encode(), "sha256")[:8], "big") >> 1

    # ------------------------------------------------------------------ patients
    def places(self, data: str, split: int, writes: bool) -> Memory:
        """Return what gives patients of these data their parts: whoever had one in an earlier study keeps it.

        split: the number that the parts are drawn from. writes: whether what is new is remembered.
        """

        def remembered(patients: Collection[str], draw: Draw, for_good: bool) -> dict[str, str]:
            key = self.key()
            marks = {name: _mark(key, f"{data}\x1f{split}\x1fpart\x1f{name}") for name in patients}
            with self._locked.alone():
                # A line that was cut off was never used.
                parts = [own for line in self._lines(PLACES) if isinstance(own := line.get("parts"), dict)]
                known = {mark: part for own in parts for mark, part in own.items()}
                found = draw({name: known[mark] for name, mark in marks.items() if mark in known})
                new = {marks[name]: part for name, part in found.items() if marks[name] not in known}
                if new and writes and for_good:
                    self._add(PLACES, {"parts": new})
            return found

        return remembered

    def near(self, data: str, parts: Mapping[DataPart, Sequence[str]], least: int) -> set[DataPart]:
        """Remember who is in which part; return the parts whose scores must not leave.

        parts: the patient of each case. Two groups of patients of which scores leave differ in nobody, or in `least`
        patients or more: the difference of their scores would be the score of the few.
        """
        key = self.key()
        marks = {part: _marks(key, data, names) for part, names in parts.items()}
        with self._locked.alone():
            lines = self._lines(PATIENTS)
            known = {(frozenset(line.get("marks", ())), frozenset(line.get("patients", ()))) for line in lines}
            found: set[DataPart] = set()
            for part, own in marks.items():
                if not parts[part]:
                    continue
                if any(_are_near(own, other, least) for other in known):
                    found.add(part)
                elif own not in known:
                    known.add(own)
                    self._add(PATIENTS, {"marks": sorted(own[0]), "patients": sorted(own[1])})
        return found

    # ------------------------------------------------------------------ answers
    def admit(self, asker: Requester, planned: Mapping[DataPart, int], settings: SiteSettings) -> None:
        """Let a study in that will ask for so many scored answers, or raise Refused; other studies that run are counted
        with all that they planned."""
        with self._locked.alone():
            counts = self.counts()
            for part in PARTS:
                self._check(counts, asker, part, max(planned[part], counts[asker].answered[part]), settings)
            self._add(ANSWERS, {**vars(asker), "planned": dict(planned), "time": int(time.time())})

    def note(self, asker: Requester, parts: Mapping[DataPart, int], settings: SiteSettings) -> None:
        """Count an answer that is about to leave, or raise Refused: it stays then."""
        with self._locked.alone():
            counts = self.counts()
            for part, times in parts.items():
                self._check(counts, asker, part, counts[asker].answered[part] + times, settings)
            self._add(ANSWERS, {**vars(asker), "answered": dict(parts), "time": int(time.time())})

    def _check(
        self, counts: Mapping[Requester, Count], asker: Requester, part: DataPart, wanted: int, settings: SiteSettings
    ) -> None:
        """Raise Refused where this many answers of one study are more than is left."""
        others = [own for own in counts if (own.lead, own.data) == (asker.lead, asker.data) and own != asker]
        left = settings.most_answers(part) - sum(self._most(other, counts[other], part) for other in others)
        if wanted > left:
            raise Refused(
                f"the study needs {wanted} answers with scores over {part} cases of this hospital, which has "
                f"{max(left, 0)} left for this lead (answers in its {FILE_NAME})"
            )

    def _most(self, asker: Requester, count: Count, part: DataPart) -> int:
        """The answers that another study had, or may yet have while it runs."""
        most = max(count.answered[part], count.planned[part])
        return most if most > count.answered[part] and self.runs(asker.study) else count.answered[part]

    def counts(self) -> dict[Requester, Count]:
        """Return what every study planned and got. What cannot be read counts as an answer on every part to all."""
        found: dict[Requester, Count] = defaultdict(Count)
        unknown = 0
        for line in self._lines(ANSWERS):
            try:
                count = found[Requester(line["lead"], line["data"], line["study"])]
                count.answered.update(line.get("answered", {}))
                if "planned" in line:
                    count.planned = Counter(line["planned"])
            except (KeyError, TypeError):
                unknown += 1
        for count in found.values():
            count.answered.update(dict.fromkeys(PARTS if unknown else (), unknown))
        return found

    def used(self, data: str) -> dict[str, Counter[str]]:
        """Return how many answers left, by lead and part."""
        leads: dict[str, Counter[str]] = defaultdict(Counter)
        for asker, count in self.counts().items():
            if asker.data == data:
                leads[asker.lead].update(count.answered)
        return leads

    # ------------------------------------------------------------------ studies at once
    def begin(self, study: str, most: int | None) -> FileLock:
        """Return what holds a study's place as long as this process lives; raises Refused when all are taken."""
        place = FileLock(self.folder / RUNNING / study, mode=FILE)
        with self._locked.alone():
            make_folder(self.folder / RUNNING)
            others = [other for other in self._running() if other != study]
            if most is not None and len(others) >= most:
                raise Refused(
                    f"this hospital works for {len(others)} already and takes {most} at once (studies in its "
                    f"{FILE_NAME}); submit the study again when one has ended"
                )
            with suppress(Timeout):  # where an earlier process of the same study, which is ending, has it
                place.acquire(timeout=0)
        return place

    def runs(self, study: str) -> bool:
        """Return whether some process holds this study's place."""
        path = self.folder / RUNNING / study
        if not path.exists():
            return False
        try:
            with FileLock(path, timeout=0, mode=FILE):
                return False
        except Timeout:
            return True

    def _running(self) -> Iterator[str]:
        for path in sorted((self.folder / RUNNING).glob("*")):
            if self.runs(path.name):
                yield path.name
            else:
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ the files
    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / name
        if not path.exists():
            return
        for line in path.read_text("utf-8", "replace").splitlines():
            try:
                read = json.loads(line)
            except (ValueError, RecursionError):
                read = None
            yield read if isinstance(read, dict) else {}

    def _add(self, name: str, line: Mapping[str, Any]) -> None:
        append_line(self.folder / name, json.dumps(line, sort_keys=True))


def _marks(key: bytes, data: str, names: Sequence[str]) -> Marks:
    """Patients with the number of their cases, and without, so that nobody who reads the file finds a name in it."""
    counted = Counter(f"{data}\x1f{name}" for name in names)
    return (
        frozenset(_mark(key, f"{name}\x1f{number}") for name, number in counted.items()),
        frozenset(_mark(key, name) for name in counted),
    )


def _are_near(one: Marks, other: Marks, least: int) -> bool:
    """Return whether few make the difference of two groups, in which a plan may give everybody other cases, too."""
    return any(0 < max(len(own - its), len(its - own)) < least for own, its in zip(one, other, strict=True))


def _mark(key: bytes, text: str) -> str:
    """Return what stands for a text that nobody without the key can guess."""
    return hmac.digest(key, text.encode(), "sha256").hex()[:MARK]


def data_set(data: DataSource | None, task: str) -> str:
    """Return what stands for a data set: its folder, or the task where there is none."""
    text = f"task {task}" if data is None else str(data.folder.resolve())
    return hashlib.sha256(text.encode()).hexdigest()[:MARK]
