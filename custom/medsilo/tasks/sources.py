"""A site's description of its data: folder, file patterns or table, columns, labels and split."""

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

ROLES = ("image", "label", "patient", "part", "site")  # keys of `columns` for a table that lists files
MISSING = (
    *("", "NA", "N/A", "n/a", "n.a.", "NaN", "nan", "null", "?", "-", ".", "k.A.", "k. A.", "n.b.", "S/D", "s/d"),
    *("N/D", "#N/A", "#NV", "#N/D", "#N/B", "#VALUE!", "#WERT!", "#VALEUR!", "#DIV/0!"),  # Excel's error values
)
FEWEST = 5  # least number of patients with an undeclared class; cases of rarer classes are left out
RARE = (
    f"cases have a label that fewer than {FEWEST} patients have; if it is right, declare it under data: "
    "label_map: {its name: what the plan calls it}"
)
LONGEST_LIST = 1 << 20  # limit on bytes of a file with patients
Pattern = Annotated[str, Field(min_length=1, max_length=500)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(as_tuple)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Pair = Annotated[tuple[Pattern, Pattern], BeforeValidator(as_tuple)]
OwnShares = Annotated[Shares, BeforeValidator(as_tuple)]
Draw = Callable[[Mapping[str, str]], dict[str, str]]  # maps the parts of known patients to those of all patients
# arguments: the patients, the function that assigns parts, and whether new parts are final
Memory = Callable[[Collection[str], Draw, bool], dict[str, str]]


class DataSource(Section):
    """The key `data` in a site's medsilo.yaml.

    Tasks with a fixed layout of files use only `folder`.

    >>> DataSource(folder="/data/kidney", images="images/*.nii.gz", labels="masks/*.nii.gz").folder.name
    'kidney'
    """

    TABLE: ClassVar[str] = "cases.csv"  # default name of the table

    folder: Path
    # Patterns of file names with *, relative to the folder. Each channel in a separate file has a pattern, by the
    # plan's name of the channel, or in the plan's order.
    images: dict[str, Pattern] | Patterns | Pattern | None = None
    labels: Pattern | None = None
    patient: Pattern | None = None  # regular expression that finds the patient in a case's name
    table: Pattern | None = None  # CSV file with one row per case, instead of patterns
    head: Names = ()  # names of the table's columns, in order, if its first row is no header
    # The table's names of the columns image (one or several), label, patient, part, site, and of the plan's columns.
    columns: dict[str, Pattern | Names] = {}
    label_map: dict[str | int, str | int] = {}  # maps this site's labels to the plan's
    unannotated: Names = ()  # structures and columns of the plan that this site did not annotate or measure
    # Keys for a table whose rows are the cases (task `table`): for categorical columns of the plan: maps this site's
    # levels to the plan's
    levels: dict[str, dict[str, str | int]] = {}
    missing: Names = MISSING  # texts that mean a missing value
    codes: dict[str, Names] = {}  # for columns of the plan: values that mean a missing value, such as 999
    limits: Names = ()  # columns in which <0.5 and >1000 are read as 0.5 and 1000
    # For columns of the plan that are numbers of days: the columns of the first and last date
    spans: dict[str, Pair] = {}
    # Columns in which a missing value is replaced by the value in the patient's previous row.
    fill: Names = ()
    # Columns that plans may use as outcomes; for patients' data, a plan can use no others. Rows without a value in one
    # of these columns are left out.
    outcome: Names = ()
    learned_as: Literal["classification", "regression", "survival"] | None = None
    required: Names = ()  # columns that every row needs; rows without a value are left out
    decimal: Literal[".", ","] = "."  # decimal sign, in tables and recordings
    # Keys for recordings (task `series-folder`):
    # the recordings' names of the columns time, label, patient, and of the plan's signals
    recording_columns: dict[str, Pattern] = {}
    rate: float | None = Field(None, gt=0, le=1e7)  # sampling rate in Hz, if it differs from the plan's
    # Shares of training, validation and test, if no table fixes the parts. With this key, no plan can change a
    # patient's part.
    shares: OwnShares | None = None
    folds: int | None = Field(None, ge=3, le=100)  # number of folds; plans cannot use another number
    # Subgroups of patients whose scores are disclosed, by name, such as sex, age or scanner.
    subgroups: Subgroups = {}
    exclude_patients: Path | None = None  # file of patients to leave out, one per line; its existence is not disclosed
    data_set: Path | None = None  # folder of the accepted data set that contains this description, if any
    lineage: str = Field("", pattern=r"^([0-9a-f]{32})?$")  # identifier that all versions of the data set share
    cache_memory: int = Field(4096, ge=0, le=10_000_000)  # limit in MiB for prepared images in memory
    cache_folder: Path | None = None  # folder for prepared images, which later runs reuse

    # The hospital's record of each patient's part; None outside of hospitals.
    _memory: Memory | None = PrivateAttr(None)
    _split: int | None = PrivateAttr(None)
    _only_tested: bool = PrivateAttr(False)
    _each_alone: bool = PrivateAttr(False)
    _facts: dict[str, Any] | None = PrivateAttr(
        None
    )  # of prepared entries by their keys; None: prepared entries are kept

    @field_validator("columns")
    @classmethod
    def _one_each(cls, columns: dict[str, str | Names]) -> dict[str, str | Names]:
        if several := [name for name, own in columns.items() if name != "image" and not isinstance(own, str)]:
            raise ValueError(f"{several[0]} must be one column; only image may have several")
        return columns

    def column(self, role: str) -> str:
        """Return the site's name of a column; by default, the key itself."""
        return str(self.columns.get(role, role))

    def check_columns(self) -> None:
        """Raise DataError if `columns` has a key that a table of files does not use."""
        if strangers := [name for name in self.columns if name not in ROLES]:
            hint = f"; did you mean {near}?" if (near := near_key(strangers[0], ROLES)) else ""
            raise DataError(f"data.columns: a table of files has {', '.join(ROLES)}{hint}", private=strangers[0])

    @staticmethod
    def expression(pattern: str) -> re.Pattern[str]:
        """Convert a pattern to a regular expression: * and ? match within a folder, ** matches any number
        of folders.
        """
        parts = {"**/": "((?:.*/)?)", "*": "([^/]*)", "?": "([^/])"}
        pieces = re.split(r"(\*\*/|\*|\?)", composed(pattern))
        return re.compile("".join(parts.get(piece) or re.escape(piece) for piece in pieces))

    def own_names(
        self, read: Sequence[str], roles: Mapping[str, str | None], key: str, known: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the site's names of the plan's columns.

        `roles` holds columns that must not be inputs of a network, by role. `key` is the settings key with the names.
        `known` holds the plan's other columns.
        """
        names: Mapping[str, Any] = getattr(self, key)
        # A data set may describe more columns than a plan reads, because it serves several plans.
        if self.data_set is None and (
            unknown := [name for name in (*names, *self.levels) if name not in {*read, *known, *roles}]
        ):
            raise DataError(
                f"data.{key} or data.levels has a column that the plan does not read; write the plan's name first",
                private=unknown[0],
            )
        called = {name: str(names.get(name, name)) for name in read}
        closed = {str(own).casefold() for own in roles.values()}  # names of columns are compared without case
        if clash := [name for name, own in called.items() if own.casefold() in closed]:
            raise DataError(
                f"the plan reads column {clash[0]!r}, which holds {', '.join(roles)} here; ask for another plan, or "
                f"correct data.{key}"
            )
        if len(set(called.values())) < len(called):
            raise DataError(f"data.{key}: two columns of the plan have the same name here; give each its own")
        return called

    def folder_of(self, site: str, dealt: bool = False) -> Path:
        """Return the folder of a site's data: the subfolder with its name, if there is one.

        With `dealt`, the plan divides one folder among all sites, so subfolders are not searched.
        """
        own = self.folder / site
        return own if not dealt and own.is_dir() and not own.is_symlink() else self.folder

    def table_file(self, folder: Path | None = None) -> Path:
        """Return the path of the table, which must be in the data folder. `folder` is searched first."""
        name = self.table or self.TABLE
        path = folder / name if folder and (folder / name).is_file() else self.folder / name
        if not path.is_file():
            hint = "correct data.table" if self.table else f"name it under data.table, or call it {name}"
            raise DataError(f"there is no table in the data folder; {hint}", str(path))
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise DataError("the table is not in the data folder but leads out of it; copy it there", str(path))
        return path

    def without(self) -> frozenset[str]:
        """Names of the patients to leave out."""
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
        """Return a copy whose split depends on the hospital's seed. `memory` records parts, which patients keep in
        later studies.
        """
        copy = self.model_copy()
        copy._split, copy._memory = split, memory
        return copy

    @property
    def split(self) -> int | None:
        """The hospital's seed of the split, or None if the plan's seed is used."""
        return self._split

    @property
    def leaves_out_rare(self) -> bool:
        """True if cases of labels with few patients are left out.

        The value is False if no patients need protection, and with differential privacy, where a patient must not
        affect others.
        """
        return self.split is not None and not self.each_alone

    def rare(self, patients: Mapping[str, Collection[str]], declared: Collection[str] = ()) -> frozenset[str]:
        """Return the undeclared labels that occur in too few patients.

        Cases of rare labels are left out, because answers to plans with and without a label would disclose its
        presence.

        `patients` holds the patients with each label, `declared` the labels that are never left out.
        """
        if not self.leaves_out_rare:
            return frozenset()
        known = {level(str(own)) for own in self.label_map} | {*declared}
        return frozenset(label for label, own in patients.items() if len({*own}) < FEWEST and level(label) not in known)

    @property
    def only_tested(self) -> bool:
        """True if the site only tests models in this study."""
        return self._only_tested

    @property
    def each_alone(self) -> bool:
        """True if a patient's part depends on that patient's name alone, so that no patient affects another."""
        return self._each_alone

    def for_study(self, only_tested: bool = False, each_alone: bool = False) -> Self:
        """Return a copy for a study in which the site only tests, or which has differential privacy."""
        copy = self.model_copy()
        copy._only_tested, copy._each_alone = only_tested, each_alone
        return copy

    def parts(self, patients: Collection[str], draw: Draw, for_good: bool) -> dict[str, str]:
        """Return each patient's part, by `draw` and the hospital's record. With `for_good`, new parts may
        be recorded.
        """
        return self._memory(patients, draw, for_good) if self._memory else draw({})

    @property
    def is_described(self) -> bool:
        """True if the settings describe the data beyond their folder."""
        kept = {"folder", "folds", "cache_memory", "data_set", "lineage"}
        return self.model_dump(exclude=kept) != DataSource(folder=self.folder).model_dump(exclude=kept)

    def once(self) -> Self:
        """Return a copy without a cache in memory, for a single pass over the data."""
        return self.model_copy(update={"cache_memory": 0})

    def for_facts(self, known: dict[str, Any]) -> Self:
        """The same data for a survey alone: of prepared entries, their facts are kept in `known`, and no images."""
        copy = self.once()
        copy._facts = known
        return copy

    @property
    def facts(self) -> dict[str, Any] | None:
        """The facts of prepared entries by their keys; None if prepared entries are kept."""
        return self._facts

    def check_folder(self) -> None:
        """Raise DataError unless the folder exists."""
        if self.folder.is_file():
            raise DataError(
                "the data are a file, and have to be a folder; give the folder that it lies in, and its name as "
                "data.table in medsilo.yaml",
                private=str(self.folder),
            )
        if not self.folder.is_dir():
            message = "the data folder does not exist; correct 'data' in this site's medsilo.yaml, or --data"
            raise DataError(message, private=str(self.folder))


def links_out(folder: Path) -> list[str]:
    """Return the relative paths of visible links in a folder that lead out of it."""
    inside, found = folder.resolve(), []
    for place, folders, files in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in (*folders, *files) if not name.startswith(".")):
            if leads_out(path, inside):
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)
