"""Define the plan's keys for columns of numbers in tables and recordings, and standardise the numbers in these
columns.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.core.section import Section
from medsilo.tasks.cells import level as as_level
from medsilo.tasks.cells import number as as_number
from medsilo.tasks.own.own_data import OwnData
from medsilo.tasks.scored_together import Classifying
from medsilo.tasks.shares import as_tuple

Text = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
# excludes names that spreadsheet programs would evaluate as formulas
ClassName = Annotated[Text, Field(pattern=r"^([^=@+\-].*|[+\-]?[0-9.]+)$")]
LARGEST = 1e9
MOST_COLUMNS = 5000


class Column(Section):
    """A column of a table or recording. If `levels` are given, the column contains categories; otherwise, it contains
    numbers.

    >>> Column.model_validate("age").inputs, Column(name="ward", levels=("A", "B")).read("B", {})
    (1, [0.0, 1.0])
    """

    name: Text = Field(
        description="the column's name in the plan, which each hospital can map to the name in its table "
        "(`data.columns`)"
    )
    levels: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = Field(
        (), max_length=1000, description="all possible categories; each becomes a network input of 0 or 1"
    )
    low: float = Field(-LARGEST, ge=-LARGEST, le=LARGEST, description="least possible number")
    high: float = Field(LARGEST, ge=-LARGEST, le=LARGEST, description="greatest possible number")
    mean: float | None = Field(
        None, ge=-LARGEST, le=LARGEST, description="mean of the column's numbers for `standardise: plan`"
    )
    deviation: float | None = Field(
        None, gt=0, le=LARGEST, description="standard deviation of the column's numbers for `standardise: plan`"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        of_numbers = {"low", "high", "mean", "deviation"}
        if self.levels and any(getattr(self, key) != type(self).model_fields[key].default for key in of_numbers):
            raise ValueError(f"{self.name}: a column with levels has no low, high, mean or deviation; remove them")
        if self.levels and len({as_level(level) for level in self.levels}) < max(2, len(self.levels)):
            raise ValueError(f"{self.name}: give two or more levels, each once")
        if self.low >= self.high:
            raise ValueError(f"{self.name}: low has to be below high")
        return self

    def __str__(self) -> str:
        return self.name

    @property
    def inputs(self) -> int:
        """Number of the network's inputs that this column provides."""
        return len(self.levels) or 1

    def read(self, cell: str, row: Mapping[str, str]) -> list[float] | None:
        """Convert a cell to the network's inputs; None if the cell has no valid value.

        Args:
            cell: the cell's text
            row: maps the hospital's levels, normalised by `cells.level`, to the plan's levels
        """
        if self.levels:
            places = {as_level(level): place for place, level in enumerate(self.levels)}
            place = places.get(as_level(row.get(as_level(cell), cell)))
            return None if place is None else [float(place == other) for other in range(len(self.levels))]
        value = as_number(cell)
        return [value] if value is not None and self.low <= value <= self.high else None


def own_labels(names: Sequence[str], label_map: Mapping[str | int, str | int]) -> dict[str, int]:
    """Map the site's labels, in normalised spelling, to indices of the plan's classes.

    Args:
        names: names of the plan's classes
        label_map: maps labels of the site to names of classes; if no name is a number, also to indices of classes
    """
    known = {as_level(label): number for number, label in enumerate(names)}
    if all(as_number(label) is None for label in names):
        known |= {str(number): number for number in range(len(names))}
    for own, plans in label_map.items():
        if as_level(str(plans)) not in known:
            raise DataError(f"data.label_map: a value is not among the plan's labels: {', '.join(names)}", str(plans))
        known[as_level(str(own))] = known[as_level(str(plans))]
    return known


Standardise = Literal["site", "plan", "none"]
FURTHEST = 100.0  # standardised inputs are clipped to this absolute value
# mean and standard deviation of each input
Scales = tuple[Tensor, Tensor]


def scaled(values: Tensor, scales: Scales) -> Tensor:
    """Standardise values, and clip them.

    Args:
        values: the values, [..., inputs]
        scales: the mean and the standard deviation of each input
    """
    means, deviations = scales
    return ((values - means) / deviations).clamp(-FURTHEST, FURTHEST)


def from_training_cases(subject: str) -> str:
    """Explain why a hospital must not standardise by its training cases under differential privacy."""
    return (
        f"numbers are scaled or filled in by a hospital's training cases, so one patient changes all others' inputs; "
        f"give public numbers (task.standardise=plan, with mean and deviation of each {subject}), or "
        "task.standardise=none"
    )


class Standardised(OwnData, Classifying):
    """Base class of tasks whose inputs are numbers in tables or recordings. These are standardised by each site's
    training cases, or by values in the plan.

    >>> Standardised.class_numbers(["no", "yes"], {1: "yes"})
    {'no': 0, 'yes': 1, '0': 0, '1': 1}
    """

    class_numbers: ClassVar = staticmethod(own_labels)
    scaled: ClassVar = staticmethod(scaled)
    from_training_cases: ClassVar = staticmethod(from_training_cases)

    labels: tuple[ClassName, ...] = Field(
        ("no", "yes"), min_length=2, max_length=254, description="names of the classes 0, 1, ... of a classification"
    )
    standardise: Standardise = Field(
        "site",
        description="which means and standard deviations standardise the inputs: those of each site's training cases "
        "(`site`), or those in the plan (`plan`); `none`: no standardisation",
    )

    @model_validator(mode="after")
    def _names_and_scales(self) -> Self:
        if len({as_level(label) for label in self.labels}) < len(self.labels):
            raise ValueError(f"labels {list(self.labels)}: name each once")
        lacking = [
            number.name for number in self.numbers if not number.levels and None in (number.mean, number.deviation)
        ]
        if self.standardise == "plan" and lacking:
            raise ValueError(f"standardise: plan needs mean and deviation of every number; {lacking[0]!r} lacks them")
        return self

    @property
    @abstractmethod
    def numbers(self) -> Sequence[Column]:
        """The columns of the plan that provide inputs of the network."""

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(number.name for number in self.numbers)

    @property
    def largest_input(self) -> float:
        """Largest absolute value of the network's inputs."""
        if self.standardise != "none":
            return FURTHEST
        return max(1.0, *(max(abs(number.low), abs(number.high)) for number in self.numbers if not number.levels))

    @property
    def needs_scales(self) -> bool:
        """True if each hospital standardises inputs by the means and standard deviations of its training cases."""
        return self.standardise == "site"

    def scales_that_were(self, scales: Mapping[str, Sequence[float]]) -> Scales:
        """Return the means and standard deviations that a survey recorded during training."""
        # the last inputs, which mark missing values, are not standardised
        names = self.input_names[: sum(number.inputs for number in self.numbers)]
        means, deviations = torch.tensor([scales[name] for name in names], dtype=torch.float64).unbind(1)
        return means, deviations
