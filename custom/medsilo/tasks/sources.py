"""A site's word on its own data: where they lie, and how its files and labels are to be read."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from os import walk
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator

from medsilo.core.errors import DataError
from medsilo.core.files import read_bounded
from medsilo.core.section import Section
from medsilo.core.text import composed
from medsilo.core.wording import near_key
from medsilo.tasks.shares import Shares, as_tuple

ROLES = ("image", "label", "patient", "part", "site")  # of the columns of a table of files
MISSING = (
    *("", "NA", "N/A", "n/a", "n.a.", "NaN", "nan", "null", "?", "-", ".", "k.A.", "k. A.", "n.b.", "S/D", "s/d"),
    *("N/D", "#N/A", "#NV", "#N/D", "#N/B", "#VALUE!", "#WERT!", "#VALEUR!", "#DIV/0!"),  # Excel's errors
)
LONGEST_LIST = 1 << 20  # bytes of a file with patients
Pattern = Annotated[str, Field(min_length=1, max_length=500)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(as_tuple)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
OwnShares = Annotated[Shares, BeforeValidator(as_tuple)]
Draw = Callable[[Mapping[str, str]], dict[str, str]]  # who has a part already -> everybody's part
Memory = Callable[[Collection[str], Draw, bool], dict[str, str]]  # patients, what draws, whether that is for good


class DataSource(Section):
    """`data` in a site's medsilo.yaml. Tasks with a layout of their own read the folder and nothing else of it.

    >>> DataSource(folder="/data/kidney", images="images/*.nii.gz", labels="masks/*.nii.gz").folder.name
    'kidney'
    """

    TABLE: ClassVar[str] = "cases.csv"  # is read where the settings name neither a table nor patterns

    folder: Path
    images: Patterns | Pattern | None = None  # patterns with *, below the folder; one per channel
    labels: Pattern | None = None
    patient: Pattern | None = None  # a regular expression that finds the patient in the name of a case
    table: Pattern | None = None  # a CSV file with one line per case, instead of patterns
    # What a table's columns are called here: image (one or several), label, patient, part, site, and the plan's own
    columns: dict[str, Pattern | Names] = {}
    label_map: dict[str | int, str | int] = {}  # this site's labels to the plan's
    unannotated: Names = ()  # structures and columns that nobody annotated or measured here
    # Of a table whose lines are cases themselves (task `table`):
    levels: dict[str, dict[str, str | int]] = {}  # of the plan's columns with categories: this site's to the plan's
    missing: Names = MISSING  # what is where a value is not known
    decimal: Literal[".", ","] = "."  # of recordings, too
    # Of recordings (task `series-folder`):
    recording_columns: dict[str, Pattern] = {}  # what is called how in each: time, label, patient, the plan's signals
    rate: float | None = Field(None, gt=0, le=1e7)  # Hz that they were recorded with, where it is not the plan's
    # Who is in training, validation and test, fixed here where no table fixes it: then no plan moves a patient.
    shares: OwnShares | None = None
    folds: int | None = Field(None, ge=3, le=100)  # plans may let patients take turns in so many parts, and no others
    exclude_patients: Path | None = (
        None  # a file with a patient on each line, as the data call them: nobody learns that it is
    )
    cache_memory: int = Field(4096, ge=0, le=10_000_000)  # MiB that images which are ready for the network may take
    cache_folder: Path | None = None  # where they are kept for later runs, too

    # What remembers each patient's part at a hospital; at home nothing does.
    _memory: Memory | None = PrivateAttr(None)
    _split: int | None = PrivateAttr(None)
    _only_tested: bool = PrivateAttr(False)
    _each_alone: bool = PrivateAttr(False)

    @field_validator("columns")
    @classmethod
    def _one_each(cls, columns: dict[str, str | Names]) -> dict[str, str | Names]:
        if several := [name for name, own in columns.items() if name != "image" and not isinstance(own, str)]:
            raise ValueError(f"{several[0]} is one column; only image may be several")
        return columns

    def column(self, role: str) -> str:
        """Return what a column of the table is called here; by default as everywhere."""
        return str(self.columns.get(role, role))

    def check_columns(self) -> None:
        """Raise a DataError for a column that no table of files has."""
        if strangers := [name for name in self.columns if name not in ROLES]:
            hint = f"; did you mean {near}?" if (near := near_key(strangers[0], ROLES)) else ""
            raise DataError(f"data.columns: a table of files has {', '.join(ROLES)}{hint}", private=strangers[0])

    @staticmethod
    def expression(pattern: str) -> re.Pattern[str]:
        """Return a pattern as a regular expression: * and ? stay within a folder, ** goes through several."""
        parts = {"**/": "((?:.*/)?)", "*": "([^/]*)", "?": "([^/])"}
        pieces = re.split(r"(\*\*/|\*|\?)", composed(pattern))
        return re.compile("".join(parts.get(piece) or re.escape(piece) for piece in pieces))

    def own_names(
        self, read: Sequence[str], roles: Mapping[str, str | None], key: str, known: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return what the plan's columns are called here.

        roles: columns here that never enter a network, by what they hold; key: that names the columns; known: others
        that the plan has.
        """
        names: Mapping[str, Any] = getattr(self, key)
        if unknown := [name for name in (*names, *self.levels) if name not in {*read, *known, *roles}]:
            raise DataError(
                f"data.{key} or data.levels has a column that the plan does not read; write the plan's name first",
                private=unknown[0],
            )
        called = {name: str(names.get(name, name)) for name in read}
        closed = {str(own).casefold() for own in roles.values()}  # as a table's columns are found
        if clash := [name for name, own in called.items() if own.casefold() in closed]:
            raise DataError(
                f"the plan reads column {clash[0]!r}, which holds {', '.join(roles)} here; ask for another plan, or "
                f"correct data.{key}"
            )
        if len(set(called.values())) < len(called):
            raise DataError(f"data.{key}: two columns of the plan have the same name here; give each its own")
        return called

    def table_file(self, folder: Path | None = None) -> Path:
        """Return the table of cases, which has to lie in the data folder. folder: where it is sought first."""
        name = self.table or self.TABLE
        path = folder / name if folder and (folder / name).is_file() else self.folder / name
        if not path.is_file():
            hint = "correct data.table" if self.table else f"name it under data.table, or call it {name}"
            raise DataError(f"there is no table in the data folder; {hint}", str(path))
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise DataError("the table is not in the data folder but leads out of it; copy it there", str(path))
        return path

    def without(self) -> frozenset[str]:
        """Return the patients who are left out."""
        if self.exclude_patients is None:
            return frozenset()
        try:
            lines = read_bounded(self.exclude_patients, LONGEST_LIST).decode("utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(
                f"data.exclude_patients can't be read ({type(error).__name__}); correct it", str(error)
            ) from error
        return frozenset(line.strip() for line in lines if line.strip())

    def drawn_by(self, split: int, memory: Memory | None = None) -> Self:
        """Return the same data, whose parts a hospital draws from a number of its own.

        memory: by which patients keep the parts that they had in earlier studies.
        """
        copy = self.model_copy()
        copy._split, copy._memory = split, memory
        return copy

    @property
    def split(self) -> int | None:
        """The number that the parts are drawn from; None where the plan's is."""
        return self._split

    @property
    def only_tested(self) -> bool:
        """Return whether the site does not train in this study, so that it needs cases for the test alone."""
        return self._only_tested

    @property
    def each_alone(self) -> bool:
        """Return whether a patient's part follows from that patient's name alone, so that nobody moves another."""
        return self._each_alone

    def for_study(self, only_tested: bool = False, each_alone: bool = False) -> Self:
        """Return the same data for a study in which the site does not train, or that promises privacy."""
        copy = self.model_copy()
        copy._only_tested, copy._each_alone = only_tested, each_alone
        return copy

    def parts(self, patients: Collection[str], draw: Draw, for_good: bool) -> dict[str, str]:
        """Return each patient's part. for_good: whether it may be remembered from now on, where it is new."""
        return self._memory(patients, draw, for_good) if self._memory else draw({})

    @property
    def is_described(self) -> bool:
        """Return whether more is said than where the folder is and what is kept of it."""
        kept = {"folder", "folds", "cache_memory"}
        return self.model_dump(exclude=kept) != DataSource(folder=self.folder).model_dump(exclude=kept)

    def once(self) -> Self:
        """The same for a single look at the data: nothing is kept in memory."""
        return self.model_copy(update={"cache_memory": 0})

    def check_folder(self) -> None:
        """Raises DataError when there is no such folder."""
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
    """The files and folders below a folder that are links out of it, by their path from there; no hidden ones."""
    inside, found = folder.resolve(), []
    for place, folders, files in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in (*folders, *files) if not name.startswith(".")):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)
