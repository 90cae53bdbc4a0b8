"""The columns that a plan reads of every hospital's table, and the numbers that networks read of them, standardised."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.core.section import Section
from medsilo.tasks.sheet import plain
from medsilo.tasks.sources import as_tuple

Text = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
LARGEST = 1e9


class Column(Section):
    """One column: numbers, or categories where `levels` are given. Every hospital reads it in the same way."""

    name: Text = Field(description="its name in the plan; a hospital says in `data.names` what it is called there")
    levels: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = Field(
        (), max_length=1000, description="of categories: all that there may be, in turn; one input each, 0 or 1"
    )
    low: float = Field(-LARGEST, ge=-LARGEST, le=LARGEST, description="of numbers: the least that is possible")
    high: float = Field(LARGEST, ge=-LARGEST, le=LARGEST, description="of numbers: the greatest that is possible")
    mean: float | None = Field(None, ge=-LARGEST, le=LARGEST, description="of numbers, with `standardise: plan`")
    deviation: float | None = Field(None, gt=0, le=LARGEST, description="of numbers, with `standardise: plan`")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        of_numbers = {"low", "high", "mean", "deviation"}
        if self.levels and any(getattr(self, key) != type(self).model_fields[key].default for key in of_numbers):
            raise ValueError(f"{self.name}: has levels, so low, high, mean and deviation say nothing; remove them")
        if self.levels and len({as_level(level) for level in self.levels}) < max(2, len(self.levels)):
            raise ValueError(f"{self.name}: give two or more levels, each once")
        if self.low >= self.high:
            raise ValueError(f"{self.name}: low has to be below high")
        return self

    def __str__(self) -> str:
        return self.name

    @property
    def inputs(self) -> int:
        """The numbers that a network reads of it."""
        return len(self.levels) or 1

    def read(self, cell: str, own: Mapping[str, str]) -> list[float] | None:
        """Return the inputs that a cell stands for; None where it is no value of this column.

        own: this hospital's levels, as `as_level` has them, to the plan's.
        """
        if self.levels:
            places = {as_level(level): place for place, level in enumerate(self.levels)}
            place = places.get(as_level(own.get(as_level(cell), cell)))
            return None if place is None else [float(place == other) for other in range(len(self.levels))]
        value = as_number(cell)
        return [value] if value is not None and self.low <= value <= self.high else None


def _named(value: Any) -> Any:
    """Return a column of numbers that is given by its name alone."""
    return Column(name=value) if isinstance(value, str) else value


ReadColumns = Annotated[tuple[Annotated[Column, BeforeValidator(_named)], ...], Field(min_length=1, max_length=5000)]


def as_number(cell: str) -> float | None:
    """Return the number that is written there; None where there is none, or none that is finite."""
    if not NUMBER.fullmatch(cell):
        return None
    value = float(cell)
    return value if math.isfinite(value) else None


def as_written(cell: str, decimal: str) -> str:
    """Return a number that a site writes with a comma as others write it."""
    return cell.strip().replace(",", ".") if decimal == "," else cell.strip()


def as_level(cell: str) -> str:
    """Return a level as it is compared: a whole number is the same however it is written, as 1 and 1.0."""
    text = plain(str(cell).strip())
    value = as_number(text)
    return str(int(value)) if value is not None and value == int(value) else text


def own_labels(names: Sequence[str], label_map: Mapping[str | int, str | int]) -> dict[str, int]:
    """Return the plan's classes by what a site calls them, as `as_level` has it."""
    known = {as_level(label): number for number, label in enumerate(names)}
    if all(as_number(label) is None for label in names):
        known |= {str(number): number for number in range(len(names))}
    for own, plans in label_map.items():
        if as_level(str(plans)) not in known:
            raise DataError(f"data.label_map: a value is not among the plan's labels: {', '.join(names)}", str(plans))
        known[as_level(str(own))] = known[as_level(str(plans))]
    return known


def own_names(
    read: Sequence[str],
    names: Mapping[str, str],
    reserved: Sequence[str],
    given: Iterable[str],
    known: Sequence[str] = (),
) -> dict[str, str]:
    """Return what the plan's columns are called at a site.

    reserved: columns there that never enter a network; given: the plan's columns of which the settings say something;
    known: others that the plan has.
    """
    if unknown := [key for key in given if key not in {*read, *known}]:
        raise DataError(
            "data.names or data.levels has a column that the plan does not read; write the plan's name first",
            private=unknown[0],
        )
    called = {name: names.get(name, name) for name in read}
    if clash := [name for name, own in called.items() if own in reserved]:
        raise DataError(
            f"the plan reads column {clash[0]!r}, which names patients, parts or sites here, or labels or times, and "
            "such columns are never read; ask for another plan, or correct data.columns or data.inside"
        )
    if len(set(called.values())) < len(called):
        raise DataError("data.names: two columns of the plan have the same name here; give each its own")
    return called


Standardise = Literal["site", "plan", "none"]
FURTHEST = 100.0  # standard deviations from the mean, to which inputs are cut
Scales = tuple[Tensor, Tensor]  # what is subtracted of each input, and what it is divided by


def scaled(values: Tensor, scales: Scales) -> Tensor:
    """Return standardised values; those of each input lie along the last axis."""
    means, deviations = scales
    return ((values - means) / deviations).clamp(-FURTHEST, FURTHEST)


def from_training_cases(what: str) -> str:
    """Return why numbers of a hospital's own training cases, such as means, can't be kept private."""
    return (
        f"numbers are scaled or filled in by a hospital's training cases, so one patient changes all others' inputs; "
        f"give public numbers (task.standardise=plan, with mean and deviation of each {what}), or task.standardise=none"
    )
