"""Define a hospital's data set: a description of how to read the data, and of the facts that are disclosed.

The description for people is in data.yaml, and a person's acceptance of the description is in accepted.json. An
inventory, inventory.csv, lists the files of the data. The description contains the inventory's digest, so that later
changes to the data are detected.
"""

import csv
import hashlib
import io
import json
import os
import secrets
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import make_folder, read_bounded, uncollected, write_text
from medsilo.core.section import Section
from medsilo.core.text import counted
from medsilo.core.yaml_text import dump_yaml
from medsilo.site.signed import read_own, write_signed
from medsilo.tasks.cells import level
from medsilo.tasks.sources import DataSource

INVENTORY, ACCEPTED, PRIVATE = "inventory.csv", "accepted.json", "private"
# data.yaml and inventory as they were accepted, in the folder PRIVATE
AS_ACCEPTED, FILES_AS_ACCEPTED = "accepted.yaml", "accepted.csv"
CASES = "cases.csv"  # list of cases in the folder PRIVATE, if patterns of file names cannot describe the cases
COLUMNS = ("file", "bytes", "changed", "sha256")
LARGEST_INVENTORY = 1 << 30  # bytes
LARGEST = 8 << 20  # bytes of accepted.json
WORKERS = 2  # number of threads that hash files
PIECE = 1 << 20  # bytes per read
AT_ONCE = 8  # number of files in each batch that a thread hashes
# If hashing takes longer than START seconds plus QUICK seconds per file, several threads hash the remaining files.
START, QUICK = 0.02, 50e-6
Count = Annotated[int, Field(ge=0)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
PartName = Literal["train", "validation", "test"]


class Patients(Section):
    known: bool = Field(description="whether the data state for each case to which patient it belongs")
    by: str = Field(
        max_length=400,
        description="the column or file-name pattern that names the patient, or the person who declared that each "
        "case is a separate patient",
    )
    count: Count
    most_cases: Count = Field(description="largest number of cases of one patient")


class DisclosedCounts(Section):
    """Rounded counts of the training, validation or test cases. The counts are disclosed once, so that all plans and
    leads get equal counts.
    """

    patients: Count = Field(
        description="number of patients, rounded to a multiple of the setting min_patients_per_metric"
    )
    cases: Count = Field(
        description="number of cases, rounded to a multiple of the setting min_patients_per_metric times most_cases"
    )
    classes: dict[Word, Count] | None = Field(
        None, description="number of patients of each class; null if a class has too few patients"
    )


class Inventory(Section):
    files: Count
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(description="SHA-256 of inventory.csv")


class DataSet(Section):
    """The description of a data set, which a person reads and accepts."""

    FILE: ClassVar[str] = "data.yaml"

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    lineage: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = Field(
        description="random identifier that all versions of a data set share, so that they have one split and one "
        "count of answers"
    )
    made: str = Field(max_length=40, description="day on which the data set was made")
    found: tuple[str, ...] = Field((), description="sentences that describe the files in the data folder")
    reading: dict[str, Any] = Field(
        description="folder or table that contains the data, and the settings for reading it"
    )
    cases: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None,
        description=f"the SHA-256 of {PRIVATE}/{CASES}, a list of images, labels and patients; null without this list",
    )
    patients: Patients
    hospitals: dict[Word, Count] = Field(
        {}, description="if the data come from several hospitals: for each hospital, the number of patients"
    )
    learns: dict[str, Any] = Field(
        description="outcomes that a study can learn to predict, each with type, name and classes"
    )
    left_out: dict[str, Count] = Field(
        {}, description="for each reason, the number of rows or images that are left out for this reason"
    )
    notes: dict[str, Count] = Field(
        {}, description="for each kind of oddity, the number of cases that have it and are used all the same"
    )
    answers: dict[str, str] = Field({}, description="for each question about the data, a person's answer")
    called: dict[Word, Word] = Field(
        {}, description="for each name of a column, level or class in these data, the name that plans use"
    )
    tells: dict[PartName, DisclosedCounts] = Field(
        description="for training, validation and test data: rounded counts, which are equal in all plans and for all "
        "leads, because they are disclosed once"
    )
    words: tuple[Word, ...] = Field(
        (), description="names from the data, such as classes, that a plan or a message may contain"
    )
    inventory: Inventory

    @property
    def identity(self) -> str:
        """SHA-256 of the description; because the description contains the inventory's digest, the SHA-256 changes if
        any file changes.
        """
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def in_words(self, least: int = 1) -> list[tuple[str, str]]:
        """Return facts about the data set for people who decide about a study, as pairs of heading and text.

        Args:
            least: smaller numbers of patients are not shown; above 1, the text contains only disclosed, rounded counts,
                so that it may leave the hospital
        """
        own = self.patients
        disclosed = sum(part.patients for part in self.tells.values())
        number = f"about {disclosed:,}" if least > 1 else f"{own.count:,}"
        if own.count < least:
            number = f"fewer than {least}"
        cases = f", at most {own.most_cases:,} cases of one" if own.most_cases > 1 else ""
        told = (
            f"{part} {counted(tell.patients, 'patient')}, {counted(tell.cases, 'case')}"
            for part, tell in self.tells.items()
        )
        return [
            ("data set", f"{self.name}, {self.identity[:12]}"),
            ("patients", f"{number}{cases}; {'named by ' if own.known else 'not named: '}{own.by}"),
            ("discloses once, to everybody", "; ".join(told)),
            *([("scores of subgroups", self._subgroups_in_words)] if self.reading.get("subgroups") else []),
            ("words that may leave", ", ".join(self.words) or "none"),
        ]

    @property
    def _subgroups_in_words(self) -> str:
        own = DataSource.from_values(self.reading, self.FILE).subgroups
        return "; ".join(f"{name}: {', '.join(one.words)}" for name, one in own.items())

    def unknown(self, words: Iterable[str]) -> list[str]:
        """Return the names in a plan that this data set lacks; 1 and 1.0 count as one name."""
        known = {*map(level, self.words)}
        return sorted({word for word in words if level(word) not in known})

    def changes_since(self, before: "DataSet") -> list[str]:
        """Return the changes since an earlier version of the data set, one change per line."""
        then, now = _flat(before.model_dump(mode="json")), _flat(self.model_dump(mode="json"))
        words = [f"word {word!r}: may leave now" for word in self.words if word not in before.words]
        words += [f"word {own!r}: may leave no more" for own in before.words if own not in self.words]
        apart = ("made", "words", "inventory", "found", "cases")
        keys = sorted(key for key in then.keys() | now.keys() if key.partition(".")[0] not in apart)
        changed = [key for key in keys if then.get(key) != now.get(key)]
        lines = [f"{key}: {then.get(key, 'nothing')} -> {now.get(key, 'nothing')}" for key in changed]
        return [*words, *lines, *(["the list of its cases is another"] if self.cases != before.cases else [])]

    def source(self, folder: Path) -> DataSource:
        values = {**self.reading, "data_set": str(folder.resolve()), "lineage": self.lineage}
        if self.cases:
            values["table"] = str(self._cases_in(folder))
        source = DataSource.from_values(values, self.FILE)
        for name, subgroup in source.subgroups.items():
            if unknown := self.unknown([name, *subgroup.words]):
                raise DataError(
                    f"{self.FILE}: subgroup {name!r} has names that the key words lacks; add the names, or remove "
                    "the subgroup",
                    ", ".join(unknown),
                )
        return source

    def _cases_in(self, folder: Path) -> Path:
        path = folder.resolve() / PRIVATE / CASES
        try:
            digest = hashlib.sha256(read_bounded(path, LARGEST_INVENTORY)).hexdigest()
        except OSError as error:
            raise DataError(f"{CASES} of the data set is missing; make the data set again", str(error)) from error
        if digest != self.cases:
            raise DataError(
                f"{CASES} of the data set does not match its digest in {self.FILE}; make the data set again", str(path)
            )
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls.in_file(folder / cls.FILE, f"the data set's {cls.FILE}", "make it: medsilo data FOLDER")

    def write(
        self, folder: Path, files: Iterable["KnownFile"], cases: str = "", reasons: Mapping[str, str] | None = None
    ) -> None:
        """Write the data set and its inventory into a folder.

        Args:
            cases: content of the list of cases
            reasons: comments that explain settings, by key of the section `reading`
        """
        make_folder(folder)
        if cases:
            make_folder(folder / PRIVATE)
            write_text(folder / PRIVATE / CASES, cases)
        write_text(folder / INVENTORY, inventory_text(files))
        shown = dump_yaml(self.model_dump(mode="json", exclude_defaults=True))
        text = _with_reasons(shown, reasons or {})
        write_text(folder / self.FILE, f"# Read this, then accept it: medsilo data accept FOLDER\n{text}")

    @staticmethod
    def drawn_lineage() -> str:
        """Return a new random identifier, the lineage, for a data set that is no new version of an earlier data set."""
        return secrets.token_hex(16)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten a nested mapping. Each key of the result consists of the nested keys, joined with dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _with_reasons(text: str, reasons: Mapping[str, str]) -> str:
    """Add comments to the text of data.yaml. Above each setting for reading the data, a comment gives the reason for
    the setting.
    """
    lines, section = list[str](), ""
    for line in text.splitlines():
        key = line.partition(":")[0]
        section = section if line.startswith((" ", "-")) else key
        if section == "reading" and (why := reasons.get(key.removeprefix("  "))) and key.startswith("  "):
            lines += [f"  # {part}" for part in textwrap.wrap(why, 100)]
        lines.append(line)
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------- the inventory
@dataclass(frozen=True)
class KnownFile:
    """A file's name, and the file's size, modification time and hash at the time of reading."""

    name: str  # path relative to the data folder
    bytes: int
    changed: int  # modification time in nanoseconds
    sha256: str


def inventory_text(files: Iterable[KnownFile]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((file.name, file.bytes, file.changed, file.sha256) for file in files)
    return text.getvalue()


def inventory_of(files: Iterable[KnownFile]) -> Inventory:
    """Return an inventory's summary for data.yaml. The inventory's digest depends on the files' names and contents, but
    not on their modification times.
    """
    known = sorted(files, key=lambda own: own.name)
    content = "\n".join(f"{own.name}\x1f{own.bytes}\x1f{own.sha256}" for own in known)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Inventory(files=len(known), bytes=sum(own.bytes for own in known), sha256=digest)


def read_inventory(folder: Path) -> dict[str, KnownFile]:
    """Return a data set's inventory by file name. Raises DataError if the inventory is damaged, or if the inventory's
    digest differs from the digest in data.yaml.
    """
    return _inventory_in(folder / INVENTORY, DataSet.read(folder))


def _inventory_in(path: Path, data_set: DataSet) -> dict[str, KnownFile]:
    try:
        rows = csv.reader(io.StringIO(read_bounded(path, LARGEST_INVENTORY).decode()))
        if tuple(next(rows, [])) != COLUMNS:
            raise ValueError("other columns")
        known = [KnownFile(name, int(size), int(changed), digest) for name, size, changed, digest in rows]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{INVENTORY} of the data set is missing or damaged; make the data set again", str(error)
        ) from error
    if inventory_of(known) != data_set.inventory:
        raise DataError(
            f"{INVENTORY} of the data set does not match its digest in {DataSet.FILE}; make the data set again",
            str(path),
        )
    return {own.name: own for own in known}


@uncollected()
def scan(
    files: Mapping[str, Path], known: Mapping[str, KnownFile], progress: Callable[[int], None] = lambda size: None
) -> list[KnownFile]:
    """Hash files, and return the hashes in the order of the file names.

    If a file's modification time and size are already in the inventory, the file is not read again.

    Args:
        progress: a function that is called with the size of each file
    """

    def look(name: str) -> KnownFile:
        before, path = known.get(name), files[name]
        if before and (before.bytes, before.changed) == _state(path.stat()):
            progress(before.bytes)
            return before
        own = _read(name, path)
        progress(own.bytes)
        return own

    names, found, began = iter(sorted(files)), list[KnownFile](), time.perf_counter()
    try:
        for name in names:
            found.append(look(name))
            if time.perf_counter() - began > START + QUICK * len(found):
                break
        with ThreadPoolExecutor(WORKERS) as pool:
            for several in pool.map(lambda names: [*map(look, names)], batched([*names])):
                found += several
        return found
    except OSError as error:
        raise DataError(
            f"a file of the data folder can't be read ({type(error).__name__}); give this account the right to read it",
            str(error),
        ) from error


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _read(name: str, path: Path) -> KnownFile:
    """Hash a file with os.read, because opening a small file with Python's reader takes more time than reading the
    file.
    """
    own, place = hashlib.sha256(), os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, changed = _state(os.fstat(place))
        left = size + 1  # reading ends here even if another process makes the file longer
        while left > 1 and (piece := os.read(place, min(left, PIECE))):
            own.update(piece)
            left -= len(piece)
        if left != 1 or _state(os.fstat(place)) != (size, changed):
            raise DataError("a file of the data folder changed while it was read; try again", str(path))
    finally:
        os.close(place)
    return KnownFile(name, size, changed, own.hexdigest())


def batched(names: Sequence[str]) -> Iterable[Sequence[str]]:
    """Split names into batches of files, because handing over a small file to a thread takes longer than hashing the
    file.
    """
    return [names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]


@dataclass(frozen=True)
class Difference:
    """The names of files that are new, changed or missing in the second of two inventories."""

    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.changed)

    def __str__(self) -> str:
        parts = (("new", self.new), ("gone", self.gone), ("changed", self.changed))
        return ", ".join(f"{counted(len(names), 'file')} {word}" for word, names in parts if names) or "no difference"


def compared(before: Mapping[str, KnownFile], now: Iterable[KnownFile]) -> Difference:
    after = {own.name: own for own in now}
    return Difference(
        tuple(sorted(after.keys() - before.keys())),
        tuple(sorted(before.keys() - after.keys())),
        tuple(sorted(name for name in after.keys() & before.keys() if after[name].sha256 != before[name].sha256)),
    )


def files_of(source: DataSource) -> dict[str, Path]:
    """Return the full path of each file of a data set; each key is the file's path relative to the data folder."""
    # the import is within the function, because the module imports torch, and reading settings does not need torch
    from medsilo.tasks.case_index import CaseIndex

    source.check_folder()
    if source.table and source.outcome:  # the cases are the rows of this table
        tables = [source.table, *(subgroup.table for subgroup in source.subgroups.values() if subgroup.table)]
        return {name: source.model_copy(update={"table": name}).table_file() for name in tables}
    return CaseIndex.files_below(source.folder, missing=False)[0]


def check_unchanged(folder: Path) -> None:
    """Raise MedsiloError if a file's size or modification time differs from the data set's inventory; the function does
    not hash the file.
    """
    known, there = read_inventory(folder), files_of(DataSet.read(folder).source(folder))
    states = {name: path.stat() for name, path in there.items()}
    now = {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}
    if now != {name: (own.bytes, own.changed) for name, own in known.items()}:
        raise MedsiloError(
            "this hospital's data differ from its data set; its engineer sees the changes with "
            "'medsilo data check DATASET', and makes the data set again",
            str(folder),
        )


# ---------------------------------------------------------------------------------------------------- the acceptance
class Acceptance(Section):
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    by: Annotated[str, Field(min_length=1, max_length=200)]
    at: Count


def accept(folder: Path, by: str, key: Any | None = None) -> Acceptance:
    """Write a person's acceptance of a data set; if a kit's key is given, sign the acceptance."""
    given = Acceptance(identity=DataSet.read(folder).identity, by=by, at=int(time.time()))
    make_folder(folder / PRIVATE)
    write_text(folder / PRIVATE / AS_ACCEPTED, (folder / DataSet.FILE).read_text("utf-8"))
    write_text(folder / PRIVATE / FILES_AS_ACCEPTED, inventory_text(read_inventory(folder).values()))
    if key is None:
        write_text(folder / ACCEPTED, given.model_dump_json(indent=1) + "\n")
    else:
        write_signed(folder / ACCEPTED, given, key)
    return given


def check_accepted(folder: Path, key: Any | None = None) -> Acceptance:
    """Return the acceptance of a data set, or raise MedsiloError if the present version of the data set was not
    accepted.

    Args:
        key: the kit's key, which must have signed the acceptance
    """
    given = _acceptance_in(folder, key)
    if given.identity != DataSet.read(folder).identity:
        raise MedsiloError(
            f"this hospital's {DataSet.FILE} differs from the accepted version; read it and accept it",
            f"{folder}: accepted by {given.by}",
        )
    return given


def as_accepted(folder: Path, key: Any | None = None) -> tuple[Acceptance, DataSet, dict[str, KnownFile]]:
    """Return a data set's acceptance, together with the description and the inventory that were accepted. Raises
    MedsiloError if nobody has accepted the data set.
    """
    given = _acceptance_in(folder, key)
    told = "what was accepted is not kept beside the data set; accept it again"
    own = DataSet.in_file(folder / PRIVATE / AS_ACCEPTED, "what was accepted", told)
    if own.identity != given.identity:
        raise DataError(told, str(folder / PRIVATE))
    return given, own, _inventory_in(folder / PRIVATE / FILES_AS_ACCEPTED, own)


def _acceptance_in(folder: Path, key: Any | None) -> Acceptance:
    path = folder / ACCEPTED
    if not path.exists():
        raise MedsiloError("nobody has accepted this hospital's data set: medsilo data accept FOLDER", str(folder))
    try:
        values = json.loads(read_bounded(path, LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise MedsiloError(f"{ACCEPTED} is damaged; accept the data set again", str(path)) from error
    content = values.get("content") if isinstance(values, dict) else None
    if key is None:
        return Acceptance.from_values(values if content is None else content, ACCEPTED)
    if content is None:
        why = "this hospital's data set was accepted without its kit, whose key signs it"
        raise MedsiloError(f"{why}: medsilo data accept FOLDER --kit KIT", str(folder))
    return read_own(path, Acceptance, key)
