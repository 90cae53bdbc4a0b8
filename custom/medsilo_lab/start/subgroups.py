"""Subgroups that the user requests for a data set. Each level of a subgroup must have enough patients."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from medsilo.core.errors import DataError
from medsilo.core.text import counted
from medsilo.tasks.cells import NUMBER, level
from medsilo.tasks.sources import FEWEST, DataSource
from medsilo.tasks.subgroups import HOSPITAL, MOST_LEVELS, Subgroup, column_of
from medsilo.tasks.table_reader import ENDINGS
from medsilo_lab.start.wording import names_a_person


@dataclass(frozen=True)
class AskedSubgroup:
    """The user's request for a subgroup: its name and its column.

    >>> AskedSubgroup.parse("age=Alter:40,60").bands, AskedSubgroup.parse("scanner=scans.csv/Device").table
    ((40.0, 60.0), 'scans.csv')
    """

    name: str
    column: str  # name of the subgroup's column; with an empty name, the subgroup is removed from the data set
    bands: tuple[float, ...] = ()
    table: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse NAME=COLUMN, NAME=COLUMN:40,60 or NAME=TABLE/COLUMN. Raise DataError for any other text."""
        name, equals, rest = text.partition("=")
        column, colon, numbers = rest.rpartition(":")
        bands: tuple[float, ...] = ()
        if colon and all(NUMBER.fullmatch(one.strip()) for one in numbers.split(",")):
            rest, bands = column, tuple(float(one) for one in numbers.split(","))
        table, _, column = rest.rpartition("/")
        if not table.lower().endswith(ENDINGS):
            table, column = "", rest
        if not (equals and name):
            raise DataError(f"--subgroup {text}: write NAME=COLUMN, or NAME=COLUMN:40,60 for bands of numbers")
        if name == HOSPITAL:
            raise DataError(f"--subgroup {text}: {HOSPITAL!r} is in every data set already; choose another name")
        return cls(name, column, bands, table or None)

    def found_in(
        self, source: DataSource, folder: Path, patients: Collection[str], called: Mapping[str, str]
    ) -> Subgroup:
        """Return the subgroup with the names of its levels. If the column of the subgroup does not divide the patients
        into levels, raise DataError.
        """
        if self.bands:
            column_of(self.name, self.column, self.table, source, folder)
            return Subgroup(column=self.column, bands=self.bands, table=self.table)
        texts, names = column_of(self.name, self.column, self.table, source, folder)
        who: defaultdict[str, set[str]] = defaultdict(set)
        for code, patient in zip(texts.codes.tolist(), names.codes.tolist(), strict=True):
            if texts.values[code] not in source.missing and names.values[patient] in patients:
                who[level(texts.values[code])].add(names.values[patient])
        found = sorted(one for one, own in who.items() if len(own) >= FEWEST)
        if not 2 <= len(found) <= MOST_LEVELS:
            raise DataError(
                f"--subgroup {self.name}: {counted(len(found), 'value')} of column {self.column!r} have {FEWEST} "
                f"patients or more, but a subgroup needs 2 to {MOST_LEVELS} such values; for numbers, use bands: "
                f"{self.name}={self.column}:40,60"
            )
        levels = {one: called.get(one, one) for one in found}
        if person := next((one for one in levels.values() if names_a_person(one)), ""):
            raise DataError(
                f"--subgroup {self.name}: {person!r} may be a person's name; give another name with "
                f"--call '{person}=NAME'"
            )
        return Subgroup(column=self.column, levels=levels, table=self.table)


def asked_again(
    before: Mapping[str, Subgroup], now: Sequence[AskedSubgroup]
) -> tuple[list[AskedSubgroup], dict[str, str]]:
    """Combine new requests for subgroups with the subgroups in the earlier version of the data set. Return all
    requests, and the names of levels in the earlier version of the data set.
    """
    every = {name: AskedSubgroup(name, own.column, own.bands, own.table) for name, own in before.items()}
    every |= {own.name: own for own in now}
    called = {str(word): name for own in before.values() for word, name in own.levels.items()}
    return [own for own in every.values() if own.column], called
