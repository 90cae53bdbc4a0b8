"""Define the settings with which a site describes its data: files, table columns, labels and split."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from os import walk
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator

from medsilo.core.errors import DataError
from medsilo.core.files import leads_out, read_bounded
from medsilo.core.section import Section
from medsilo.core.text import composed
from medsilo.core.wording import near_key
from medsilo.tasks.cells import level
from medsilo.tasks.shares import Shares, as_tuple
from medsilo.tasks.subgroups import Subgroups

# roles of columns in a table whose rows name the files of cases
ROLES = ("image", "label", "patient", "part", "site")
MISSING = (
    *("", "NA", "N/A", "n/a", "n.a.", "NaN", "nan", "null", "?", "-", ".", "k.A.", "k. A.", "n.b.", "S/D", "s/d"),
    # Excel's error values
    *("N/D", "#N/A", "#NV", "#N/D", "#N/B", "#VALUE!", "#WERT!", "#VALEUR!", "#DIV/0!"),
)
# a label that the site did not declare needs this many patients; otherwise, its cases are left out
FEWEST = 5
RARE = (
    f"cases have a label that fewer than {FEWEST} patients have; if it is right, declare it under data: "
    "label_map: {its name: what the plan calls it}"
)
LONGEST_LIST = 1 << 20  # limit on the bytes of a file with patient names
Pattern = Annotated[str, Field(min_length=1, max_length=500)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(as_tuple)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Pair = Annotated[tuple[Pattern, Pattern], BeforeValidator(as_tuple)]
OwnShares = Annotated[Shares, BeforeValidator(as_tuple)]
# assigns every patient to training, validation or test; the argument contains the parts of known patients
Draw = Callable[[Mapping[str, str]], dict[str, str]]
# as `DataSource.parts`: returns the part of each patient
Memory = Callable[[Collection[str], Draw, bool], dict[str, str]]


class DataSource(Section):
    """The settings under the key `data` in a site's medsilo.yaml.

    For a task that prescribes the layout of files, only the key `folder` is allowed to describe the data.

    >>> DataSource(folder="/data/kidney", images="images/*.nii.gz", labels="masks/*.nii.gz").folder.name
    'kidney'
    """

    TABLE: ClassVar[str] = "cases.csv"  # file name of the table if the settings state no file name

    folder: Path
    # Patterns of image files, relative to the folder, such as images/*.nii.gz. If channels are in separate files: a
    # dictionary from the plan's channel names to patterns, or a list of patterns in the plan's order.
    images: dict[str, Pattern] | Patterns | Pattern | None = None
    labels: Pattern | None = None
    patient: Pattern | None = None  # regular expression that finds the patient in a case's name
    # file name of a table with one row per case, which is used instead of file name patterns
    table: Pattern | None = None
    head: Names = ()  # names of the table's columns, in order, if the table has no header
    # Names of the table's columns, by their role (image, label, patient, part or site) or by the plan's name of the
    # column. Only the role image may have several columns.
    columns: dict[str, Pattern | Names] = {}
    label_map: dict[str | int, str | int] = {}  # maps this site's labels to the plan's labels
    # Structures and columns of the plan that this site did not annotate or measure.
    unannotated: Names = ()
    # The next keys are for the task `table`. This key maps, for each column with levels, this site's levels to the
    # plan's.
    levels: dict[str, dict[str, str | int]] = {}
    missing: Names = MISSING  # strings that stand for a missing value
    codes: dict[str, Names] = {}  # for each column of the plan, numbers that stand for a missing value, such as 999
    limits: Names = ()  # columns in which <0.5 is read as 0.5, and >1000 as 1000
    # columns of the plan that count the days between two dates, each with the table's columns of the dates
    spans: dict[str, Pair] = {}
    # columns in which a missing value takes the value of the patient's previous row
    fill: Names = ()
    # Columns that plans may predict, if the site declares any; then, rows without a value in one of them are left out
    outcome: Names = ()
    learned_as: Literal["classification", "regression", "survival"] | None = None
    required: Names = ()  # rows without a value in one of these columns are left out
    decimal: Literal[".", ","] = "."  # decimal sign in tables and recordings
    # The next keys are for the task `series-folder`. This key maps time, label, patient and the plan's signals to
    # columns of the recordings. For WFDB recordings, `label` may be a suffix of annotation files, such as .atr, whose
    # rhythms are then the labels.
    recording_columns: dict[str, Pattern] = {}
    # sampling rate of the recordings in Hz, if it differs from the plan's
    rate: float | None = Field(None, gt=0, le=1e7)
    # fractions of patients for training, validation and test, which replace the plan's unless a table assigns the
    # patients
    shares: OwnShares | None = None
    folds: int | None = Field(None, ge=3, le=100)  # the only number of cross-validation folds that plans may use
    # subgroups of patients, such as sex, age or scanner, whose test scores are disclosed
    subgroups: Subgroups = {}
    # file with the patients to leave out, one per line; results do not show whether it exists
    exclude_patients: Path | None = None
    data_set: Path | None = None  # the folder of the data set that contains these settings, if any
    lineage: str = Field("", pattern=r"^([0-9a-f]{32})?$")  # identifier that all versions of the data set share
    cache_memory: int = Field(4096, ge=0, le=10_000_000)  # largest size in MiB of prepared images in memory
    cache_folder: Path | None = None  # folder in which prepared images are stored for later runs

    # assigns each patient to training, validation or test, and records it at the hospital; None: no record
    _memory: Memory | None = PrivateAttr(None)
    _split: int | None = PrivateAttr(None)
    _only_tested: bool = PrivateAttr(False)
    _each_alone: bool = PrivateAttr(False)
    _facts: dict[str, Any] | None = PrivateAttr(
        None
    )  # facts about images or recordings by cache key, if a survey needs only these

    @field_validator("columns")
    @classmethod
    def _one_each(cls, columns: dict[str, str | Names]) -> dict[str, str | Names]:
        if several := [name for name, column in columns.items() if name != "image" and not isinstance(column, str)]:
            raise ValueError(f"{several[0]} must be one column; only image may have several")
        return columns

    def column(self, role: str) -> str:
        """Return the site's name of a column of the plan: by default, the plan's name."""
        return str(self.columns.get(role, role))

    def check_columns(self) -> None:
        if strangers := [name for name in self.columns if name not in ROLES]:
            hint = f"; did you mean {near}?" if (near := near_key(strangers[0], ROLES)) else ""
            raise DataError(
                f"data.columns: a table that lists files can only have the columns {', '.join(ROLES)}{hint}",
                private=strangers[0],
            )

    @staticmethod
    def expression(pattern: str) -> re.Pattern[str]:
        """Convert a pattern to a regular expression: * matches any characters except slashes, ? matches one character,
        and **/ matches any number of folders.
        """
        parts = {"**/": "((?:.*/)?)", "*": "([^/]*)", "?": "([^/])"}
        pieces = re.split(r"(\*\*/|\*|\?)", composed(pattern))
        return re.compile("".join(parts.get(piece) or re.escape(piece) for piece in pieces))

    def own_names(
        self, read: Sequence[str], roles: Mapping[str, str | None], key: str, known: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the names that the plan's columns have at the site.

        Args:
            read: the plan's columns
            roles: for each role, such as patient, the site's column, which must not be an input of a network
            key: the settings key that maps the plan's names to the site's names
            known: further columns of the plan, which are not read
        """
        names: Mapping[str, Any] = getattr(self, key)
        # a data set may describe more columns than this plan reads, because it serves several plans
        if self.data_set is None and (
            unknown := [name for name in (*names, *self.levels) if name not in {*read, *known, *roles}]
        ):
            raise DataError(
                f"data.{key} or data.levels names a column that the plan does not read; begin each entry with the "
                "plan's name of the column",
                private=unknown[0],
            )
        called = {name: str(names.get(name, name)) for name in read}
        # case is ignored, as `spelling` ignores it
        closed = {str(role).casefold() for role in roles.values()}
        if clash := [name for name, own in called.items() if own.casefold() in closed]:
            raise DataError(
                f"the plan reads column {clash[0]!r}, which this site reads as {', '.join(roles)}; ask for another "
                f"plan, or correct data.{key}"
            )
        if len(set(called.values())) < len(called):
            raise DataError(f"data.{key}: two columns of the plan have one name here; give each a name of its own")
        return called

    def folder_of(self, site: str, dealt: bool = False) -> Path:
        """Return the folder of a site's data: the subfolder with the site's name, or, without such a subfolder, the
        data folder.

        Args:
            site: the site's name
            dealt: whether the plan divides one folder among all sites, so that the data folder is returned
        """
        own = self.folder / site
        return own if not dealt and own.is_dir() and not own.is_symlink() else self.folder

    def table_file(self, folder: Path | None = None) -> Path:
        """Return the path of the table: in the given folder, or else in the data folder."""
        name = self.table or self.TABLE
        path = folder / name if folder and (folder / name).is_file() else self.folder / name
        if not path.is_file():
            hint = "correct data.table" if self.table else f"name it under data.table, or call it {name}"
            raise DataError(f"there is no table in the data folder; {hint}", str(path))
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise DataError(
                "the table is a link that leads out of the data folder; copy the table into the data folder", str(path)
            )
        return path

    def without(self) -> frozenset[str]:
        """Return the names of the patients to leave out."""
        if self.exclude_patients is None:
            return frozenset()
        try:
            lines = read_bounded(self.exclude_patients, LONGEST_LIST).decode("utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(
                f"the file of data.exclude_patients can't be read ({type(error).__name__}); correct its path or rights",
                str(error),
            ) from error
        return frozenset(line.strip() for line in lines if line.strip())

    def drawn_by(self, split: int, memory: Memory | None = None) -> Self:
        """Return a copy that splits the data with the hospital's seed.

        Args:
            split: the hospital's seed
            memory: a function that records the part of each patient, so that patients keep their parts in later studies
        """
        copy = self.model_copy()
        copy._split, copy._memory = split, memory
        return copy

    @property
    def split(self) -> int | None:
        """The hospital's seed for splitting the data; None if the plan's seed splits the data."""
        return self._split

    @property
    def leaves_out_rare(self) -> bool:
        """True if the hospital leaves out cases whose label too few patients have.

        Such cases stay if no patients need protection. They also stay under differential privacy, because one patient
        must not affect which cases of others are used.
        """
        return self.split is not None and not self.each_alone

    def rare(self, patients: Mapping[str, Collection[str]], declared: Collection[str] = ()) -> frozenset[str]:
        """Return the labels that too few patients have and that the site did not declare.

        Cases with such a label are left out, because a lead could compare plans with and without the label to learn
        about its patients.

        Args:
            patients: for each label, the patients who have the label
            declared: labels that the site declared, in addition to the labels in `label_map`
        """
        if not self.leaves_out_rare:
            return frozenset()
        known = {level(str(own)) for own in self.label_map} | {*declared}
        return frozenset(
            label for label, patient in patients.items() if len({*patient}) < FEWEST and level(label) not in known
        )

    @property
    def only_tested(self) -> bool:
        return self._only_tested

    @property
    def each_alone(self) -> bool:
        """True if a patient's name alone determines the patient's part, as differential privacy requires."""
        return self._each_alone

    def for_study(self, only_tested: bool = False, each_alone: bool = False) -> Self:
        """Return a copy of the data source for one study.

        Args:
            only_tested: whether the study only tests on the data, as at an evaluation site
            each_alone: whether the study has differential privacy, so that a patient's part must not depend on other
                patients
        """
        copy = self.model_copy()
        copy._only_tested, copy._each_alone = only_tested, each_alone
        return copy

    def parts(self, patients: Collection[str], draw: Draw, for_good: bool) -> dict[str, str]:
        """Return the part of each patient: training, validation or test.

        Args:
            patients: the patients' names
            draw: a function that assigns parts to patients without a recorded part
            for_good: whether new assignments may be recorded
        """
        return self._memory(patients, draw, for_good) if self._memory else draw({})

    @property
    def is_described(self) -> bool:
        kept = {"folder", "folds", "cache_memory", "data_set", "lineage"}
        return self.model_dump(exclude=kept) != DataSource(folder=self.folder).model_dump(exclude=kept)

    def once(self) -> Self:
        """Return a copy for reading the data only once, so that prepared images need not stay in memory."""
        return self.model_copy(update={"cache_memory": 0})

    def for_facts(self, known: dict[str, Any]) -> Self:
        """Return a copy for a survey, which stores facts about images or recordings in `known`, and keeps no prepared
        images.
        """
        copy = self.once()
        copy._facts = known
        return copy

    @property
    def facts(self) -> dict[str, Any] | None:
        """Facts about images or recordings, by cache key; None if the prepared images or recordings themselves are
        kept.
        """
        return self._facts

    def check_folder(self) -> None:
        if self.folder.is_file():
            raise DataError(
                "the data must be a folder, but are a file; give the file's folder, and its name as data.table in "
                "medsilo.yaml",
                private=str(self.folder),
            )
        if not self.folder.is_dir():
            message = "the data folder does not exist; correct 'data' in this site's medsilo.yaml, or --data"
            raise DataError(message, private=str(self.folder))


def links_out(folder: Path) -> list[str]:
    """Return the relative paths of all symbolic links that lead out of a folder, without hidden files."""
    inside, found = folder.resolve(), []
    for place, folders, files in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in (*folders, *files) if not name.startswith(".")):
            if leads_out(path, inside):
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)
