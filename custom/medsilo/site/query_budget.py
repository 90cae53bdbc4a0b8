"""A hospital's records of all studies: the hospital's secret key, the patients in disclosed scores, and the answers to
each lead.

Each site has a folder that only the site's user account can read. Processes never change a line of the files, but only
append lines, under a lock that all processes of the hospital share. An answer leaves the hospital only after the answer
was counted on disk. If a process dies after counting an answer and before sending it, the count is too high by one; the
count is never too low.
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
KEY, ANSWERS, PATIENTS, PLACES, TOLD = "key", "answers.jsonl", "patients.jsonl", "parts.jsonl", "told.jsonl"
LOCK, RUNNING = "book.lock", "running"
WAIT = 60.0  # seconds to wait for another process's lock
MESSAGES = "messages"  # key under which a training script's messages are counted
MARK = 16  # hexadecimal digits of a patient's keyed hash
# Two sets of keyed hashes for a group of patients: hashes of name and number of cases, and hashes of the name alone.
Marks = tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True)
class LockedFolder:
    folder: Path
    lock: str
    wait: float  # seconds to wait for another process's lock
    holds: str  # the description of the folder's content in error messages, such as "this hospital's records"
    unless: str  # end of an error message: what cannot be done while the folder cannot be used

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context, hold the lock; raise MedsiloError if the lock cannot be acquired."""
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
    """One study of a data set by a lead. All leads without a name count as one lead."""

    lead: str
    data: str
    study: str


@dataclass
class Count:
    """For each part of the data, the number of answers to one study."""

    answered: Counter[str] = field(default_factory=Counter)
    # number of answers that the study planned when it was admitted
    planned: Counter[str] = field(default_factory=Counter)
    # for a training script: the number of messages, and the bits of the messages by type of content
    sent: Counter[str] = field(default_factory=Counter)


class QueryBudget:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locked = LockedFolder(folder, LOCK, WAIT, "this hospital's records", "nothing with scores leaves")

    # ------------------------------------------------------------------ the key
    def key(self) -> bytes:
        """Return this hospital's secret key, which is also the seed for splitting the data. The first call creates the
        hospital's secret key.
        """
        with self._locked.alone():
            path = self.folder / KEY
            if not path.exists():
                write_text(path, secrets.token_hex(32))
            return self._read_key()

    @property
    def may_begin(self) -> bool:
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
        return (self.folder / KEY).exists()

    def number(self, purpose: str) -> int:
        return int.from_bytes(hmac.digest(self.key(), purpose.encode(), "sha256")[:8], "big") >> 1

    # ------------------------------------------------------------------ patients
    def places(self, data: str, split: int, writes: bool) -> Memory:
        """Return the function that assigns a data set's patients to training, validation and test. Patients with a
        recorded assignment keep this assignment.

        Args:
            writes: whether new assignments are saved
        """

        def remembered(patients: Collection[str], draw: Draw, for_good: bool) -> dict[str, str]:
            key = self.key()
            marks = {name: _mark(key, f"{data}\x1f{split}\x1fpart\x1f{name}") for name in patients}
            with self._locked.alone():
                # An incomplete line is skipped, because no study has used its assignment.
                parts = [own for line in self._lines(PLACES) if isinstance(own := line.get("parts"), dict)]
                known = {mark: part for own in parts for mark, part in own.items()}
                found = draw({name: known[mark] for name, mark in marks.items() if mark in known})
                new = {marks[name]: part for name, part in found.items() if marks[name] not in known}
                if new and writes and for_good:
                    self._add(PLACES, {"parts": new})
            return found

        return remembered

    def near(self, data: str, parts: Mapping[DataPart, Sequence[str]], least: int) -> set[DataPart]:
        """Record the patients of each part of the data, and return the parts whose scores must not leave the hospital.

        Scores of two groups of patients may be disclosed only if the groups are equal, or differ in at least a minimum
        number of patients. If two groups differed in only a few patients, somebody could compute the scores of these
        patients from the scores of both groups.

        Args:
            parts: the patient of each case, by part of the data (training, validation or test)
        """
        key = self.key()
        marks = {part: _marks(key, data, names) for part, names in parts.items()}
        with self._locked.alone():
            lines = self._lines(PATIENTS)
            known = {(frozenset(line.get("marks", ())), frozenset(line.get("patients", ()))) for line in lines}
            found: set[DataPart] = set()
            for part, mark in marks.items():
                if not parts[part]:
                    continue
                if any(_are_near(mark, other, least) for other in known):
                    found.add(part)
                elif mark not in known:
                    known.add(mark)
                    self._add(PATIENTS, {"marks": sorted(mark[0]), "patients": sorted(mark[1])})
        return found

    def told_once(self, data: str, names: Sequence[str], least: int, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the numbers to disclose about a group of patients.

        If an earlier disclosure was about almost the same group, the numbers of the earlier disclosure are returned.
        Because the earlier numbers are repeated, nobody can compute numbers of a few patients from two disclosures.

        The caller must disclose no other number about this group of patients.

        Args:
            names: the patient of each case
        """
        key = self.key()
        own = {_mark(key, f"{data}\x1f{name}") for name in names}
        with self._locked.alone():
            known: dict[frozenset[str], dict[str, Any]] = {}
            for line in self._lines(TOLD):
                if isinstance(told := line.get("told"), dict):
                    known.setdefault(frozenset(line.get("patients", ())), {}).update(told)
            near = (group for group in known if max(len(own - group), len(group - own)) < least)
            first = next(near, None)
            if first is not None and (first != own or numbers.keys() <= known[first].keys()):
                return known[first]
            before = {} if first is None else known[first]
            new = {name: number for name, number in numbers.items() if name not in before}
            self._add(TOLD, {"patients": sorted(own), "told": new})
        return {**before, **new}

    # ------------------------------------------------------------------ answers
    def admit(self, requester: Requester, planned: Mapping[DataPart, int], settings: SiteSettings) -> None:
        """Admit a study if the query budget suffices for the study's planned answers with scores; otherwise, raise
        Refused.

        If a study is running, all of its planned answers count, including those that have not been sent yet.
        """
        with self._locked.alone():
            counts = self.counts()
            self._check_studies(counts, requester, settings)
            for part in PARTS:
                self._check(counts, requester, part, max(planned[part], counts[requester].answered[part]), settings)
            self._add(ANSWERS, {**vars(requester), "planned": dict(planned), "time": int(time.time())})

    def note(
        self,
        requester: Requester,
        parts: Mapping[DataPart, int],
        settings: SiteSettings,
        sent: Mapping[str, int] | None = None,
    ) -> None:
        """Count an answer before the answer is sent, or raise Refused if the query budget is spent."""
        with self._locked.alone():
            counts = self.counts()
            for part, times in parts.items():
                self._check(counts, requester, part, counts[requester].answered[part] + times, settings)
            bits = {"sent": {MESSAGES: 1, **sent}} if sent is not None else {}
            self._add(ANSWERS, {**vars(requester), "answered": dict(parts), **bits, "time": int(time.time())})

    def _check_studies(self, counts: Mapping[Requester, Count], requester: Requester, settings: SiteSettings) -> None:
        """Raise Refused if a lead has begun as many studies of a data set as this hospital allows.

        Each study discloses the number of patients, even if the study is rejected after the data are read.
        """
        begun = {count.study for count in counts if (count.lead, count.data) == (requester.lead, requester.data)}
        if requester.study not in begun and len(begun) >= settings.most_studies:
            raise Refused(
                f"this lead has begun {len(begun)} studies of this hospital's data, and the hospital "
                f"allows {settings.most_studies}; the hospital can raise answers in its {FILE_NAME}"
            )

    def _check(
        self,
        counts: Mapping[Requester, Count],
        requester: Requester,
        part: DataPart,
        wanted: int,
        settings: SiteSettings,
    ) -> None:
        others = [
            count
            for count in counts
            if (count.lead, count.data) == (requester.lead, requester.data) and count != requester
        ]
        left = settings.most_answers(part) - sum(self._most(other, counts[other], part) for other in others)
        if wanted > left:
            raise Refused(
                f"the study needs {wanted} answers with scores over {part} cases of this hospital, which has "
                f"{max(left, 0)} left for this lead (answers in its {FILE_NAME})"
            )

    def _most(self, requester: Requester, count: Count, part: DataPart) -> int:
        """Return the number of answers that count for another study: the planned answers while that study runs,
        and afterwards the sent answers.
        """
        most = max(count.answered[part], count.planned[part])
        return most if most > count.answered[part] and self.runs(requester.study) else count.answered[part]

    def counts(self) -> dict[Requester, Count]:
        """Return the planned and sent answers of every study.

        An unreadable line counts as one answer about every part of the data, for every lead.
        """
        found: dict[Requester, Count] = defaultdict(Count)
        unknown = 0
        for line in self._lines(ANSWERS):
            try:
                count = found[Requester(line["lead"], line["data"], line["study"])]
                count.answered.update(line.get("answered", {}))
                count.sent.update(line.get("sent", {}))
                if "planned" in line:
                    count.planned = Counter(line["planned"])
            except (KeyError, TypeError):
                unknown += 1
        for count in found.values():
            count.answered.update(dict.fromkeys(PARTS if unknown else (), unknown))
        return found

    def used(self, data: str) -> dict[str, Counter[str]]:
        """Return the number of sent answers about a data set, by lead and part of the data."""
        leads: dict[str, Counter[str]] = defaultdict(Counter)
        for requester, count in self.counts().items():
            if requester.data == data:
                leads[requester.lead].update(count.answered)
        return leads

    # ------------------------------------------------------------------ studies at once
    def begin(self, study: str, most: int | None) -> FileLock:
        """Return a lock. While this process lives and holds the lock, the study counts as running.

        Raises Refused if too many studies are already running.
        """
        place = FileLock(self.folder / RUNNING / study, mode=FILE)
        with self._locked.alone():
            make_folder(self.folder / RUNNING)
            others = [other for other in self._running() if other != study]
            if most is not None and len(others) >= most:
                raise Refused(
                    f"this hospital works for {len(others)} studies already, and allows {most} at once (studies in its "
                    f"{FILE_NAME}); submit the study again when one has ended"
                )
            with suppress(Timeout):  # an earlier process of the same study may still hold the lock until it ends
                place.acquire(timeout=0)
        return place

    def runs(self, study: str) -> bool:
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
    """Return two sets of keyed hashes that disclose no names: one of each patient with the number of cases, one of each
    patient alone.
    """
    counted = Counter(f"{data}\x1f{name}" for name in names)
    return (
        frozenset(_mark(key, f"{name}\x1f{number}") for name, number in counted.items()),
        frozenset(_mark(key, name) for name in counted),
    )


def _are_near(marks: Marks, other: Marks, least: int) -> bool:
    """Return True if two groups of patients are not equal, but differ only in a few patients, or in these patients'
    numbers of cases.

    Args:
        least: minimum number of patients in which two different groups must differ
    """
    return any(0 < max(len(mark - its), len(its - mark)) < least for mark, its in zip(marks, other, strict=True))


def _mark(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256").hex()[:MARK]


def data_set(data: DataSource | None, task: str) -> str:
    """Return a data set's identifier: a hash of its lineage, else of its folder's path, or of the task if it has no
    data source.
    """
    text = f"task {task}" if data is None else data.lineage or str(data.folder.resolve())
    return hashlib.sha256(text.encode()).hexdigest()[:MARK]
