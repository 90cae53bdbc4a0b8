"""Assign a hospital's patients to the subgroups that the data set declares, for example by sex, age or scanner."""

from bisect import bisect_right
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from medsilo.core.errors import DataError
from medsilo.core.section import Section
from medsilo.tasks.cells import level
from medsilo.tasks.shares import as_tuple

if TYPE_CHECKING:
    from medsilo.tasks.columns import TextColumn
    from medsilo.tasks.sources import DataSource

HOSPITAL = "hospital"  # a predefined subgroup, whose levels are the hospitals
MOST_SUBGROUPS, MOST_LEVELS = 6, 12
SubgroupWord = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f-\x9f]([^\x00-\x1f\x7f-\x9f]{0,58}\S)?$")]
Ends = Annotated[tuple[float, ...], BeforeValidator(as_tuple)]
# for each subgroup, a mapping of patients to levels; patients without a level are left out
Members = dict[str, dict[str, str]]


class Subgroup(Section):
    """A table's column that groups patients, by its levels or by bands of its numbers.

    >>> Subgroup(column="age", bands=(40, 60)).words
    ('under 40', '40 to under 60', '60 and over')
    """

    column: Annotated[str, Field(min_length=1, max_length=500)]
    # maps the column's levels to the names that leave the hospital
    levels: dict[str | int, SubgroupWord] = Field({}, max_length=MOST_LEVELS)
    bands: Ends = Field((), max_length=MOST_LEVELS - 1)  # limits between neighbouring bands
    # table in the data folder with this column; None: the table of cases
    table: Annotated[str, Field(min_length=1, max_length=500)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.levels) == bool(self.bands):
            raise ValueError(f"column {self.column!r}: give either its levels, or the bands of its numbers")
        if list(self.bands) != sorted(set(self.bands)):
            raise ValueError(f"bands {list(self.bands)}: the limits must increase")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the levels or bands, from the first to the last."""
        if not self.bands:
            return tuple(dict.fromkeys(self.levels.values()))
        ends = [f"{end:g}" for end in self.bands]
        between = (f"{low} to under {high}" for low, high in pairwise(ends))
        return (f"under {ends[0]}", *between, f"{ends[-1]} and over")

    def named(self, values: tuple[str, ...], decimal: str) -> list[str | None]:
        """Return the name of the level or band of each cell, or None for a cell that matches none."""
        if not self.bands:
            known = {level(str(own)): name for own, name in self.levels.items()}
            return [known.get(level(value)) for value in values]
        from medsilo.tasks.columns import numbers_in

        numbers = numbers_in(values, decimal).tolist()
        return [None if isnan(number) else self.words[bisect_right(self.bands, number)] for number in numbers]


def _no_hospital(subgroups: dict[str, Subgroup]) -> dict[str, Subgroup]:
    if HOSPITAL in subgroups:
        raise ValueError(f"subgroup {HOSPITAL!r} is predefined; choose another name")
    return subgroups


Subgroups = Annotated[dict[SubgroupWord, Subgroup], Field(max_length=MOST_SUBGROUPS), AfterValidator(_no_hospital)]


def members_of(source: "DataSource", folder: Path) -> Members:
    """Return each patient's level in each subgroup that a data source declares.

    The first number in a patient's rows determines the band. A patient whose rows have different levels is left out of
    the subgroup.
    """
    return {name: _members(name, subgroup, source, folder) for name, subgroup in source.subgroups.items()}


def _members(name: str, subgroup: Subgroup, source: "DataSource", folder: Path) -> dict[str, str]:
    texts, patients = column_of(name, subgroup.column, subgroup.table, source, folder)
    named = zip(texts.values, subgroup.named(texts.values, source.decimal), strict=True)
    names = [None if text in source.missing else one for text, one in named]
    found: dict[str, str | None] = {}
    for who, code in zip(patients.codes.tolist(), texts.codes.tolist(), strict=True):
        if (told := names[code]) is not None:
            before = found.setdefault(patients.values[who], told)
            if before != told and not subgroup.bands:
                found[patients.values[who]] = None
    return {who: told for who, told in found.items() if told is not None}


def column_of(
    name: str, column: str, table: str | None, source: "DataSource", folder: Path
) -> "tuple[TextColumn, TextColumn]":
    """Return the table's column that defines a subgroup, and the table's column of patients."""
    from medsilo.tasks.columns import read_columns

    if table is None and (source.table is None or Path(source.table).is_absolute()):
        raise DataError(
            f"data.subgroups: name the table of subgroup {name!r}, because no table in the data folder lists the cases"
        )
    found = read_columns((source.model_copy(update={"table": table}) if table else source).table_file(folder))
    own, patient = found.find(column), found.find(source.column("patient"))
    if own is None:
        raise DataError(f"data.subgroups: the table lacks the column of {name!r}; correct the column's name", column)
    if patient is None and table:
        raise DataError(f"data.subgroups: the table of {name!r} lacks a column of patients; name it under data.columns")
    return found.column(own), found.line_names() if patient is None else found.column(patient)
