"""Define the task `table`, whose cases are the rows of a hospital's table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.models.architectures import Linear
from medsilo.models.network import Network
from medsilo.tasks.inference import Inference
from medsilo.tasks.objective import Objective
from medsilo.tasks.own.own_numbers import (
    LARGEST,
    MOST_COLUMNS,
    Column,
    Scales,
    Standardised,
    Text,
    from_training_cases,
    scaled,
)
from medsilo.tasks.regression import Regression
from medsilo.tasks.scored_together import ACCURACY, Deciding, classification
from medsilo.tasks.survival import EVENTS, Survival

if TYPE_CHECKING:  # this import is only for type checking, because only sites read cases
    from medsilo.tasks.own.table_rows import TableRows
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey

MOST_INPUTS = 20_000
Kind = Literal["classification", "regression", "survival"]


@cache
def goal_of(kind: Kind, labels: tuple[str, ...], limits: tuple[float, float], score: Deciding = ACCURACY) -> Objective:
    """Return the objective: classification, regression or survival analysis."""
    if kind == "classification":
        return classification(labels, score, 1 if len(labels) == 2 else None)
    return Regression(limits) if kind == "regression" else Survival()


class PatientTable(Standardised):
    """A task whose cases are the rows of a table, which each site's settings describe."""

    title: ClassVar[str] = "A hospital's own table: classification, regression or survival"
    use: ClassVar[Inference] = Inference("tables")
    names_outcome: ClassVar[bool] = True
    # large enough for one batch, because the concordance index compares all cases with each other
    evaluation_batch: ClassVar[int] = 1_000_000

    name: Literal["table"] = "table"
    kind: Kind = Field("classification", description="objective")
    range: tuple[float, float] = Field((0.0, 1.0), description="for a regression: least and greatest possible outcome")
    columns: tuple[Column, ...] = Field(
        default=(Column(name="age"),),
        min_length=1,
        max_length=MOST_COLUMNS,
        description="columns that are inputs of the network: a name for numbers, or `{name: ..., levels: [...]}` for "
        "categories",
    )
    target: Text = Field(
        default="outcome", description="column to predict: the class of a case, or the number for a regression"
    )
    time: Text = Field("time", description="for survival: column with the time until the event or the last visit")
    event: Text = Field("event", description="for survival: column with 1 (event) or 0 (censored)")
    missing: Literal["mean", "mark"] = Field(
        "mean",
        description="replacement for a missing or invalid value. `mean`: the mean by which the column is standardised; "
        "without standardisation, the column's `mean` in the plan, or 0. For a missing category, all its "
        "inputs are 0. `mark`: the same, and one more input per column, which is 1 if the value is "
        "missing. The plan can't exclude patients with missing values, because each hospital's data set "
        "determines the patients",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        names = [column.name for column in self.columns]
        outcomes = self.outcomes
        if twice := sorted(name for name, count in Counter([*names, *outcomes]).items() if count > 1):
            raise ValueError(
                f"column {twice[0]!r} is named twice; name each column once, and leave the outcome out of the columns"
            )
        if self.channels > MOST_INPUTS:
            raise ValueError(f"columns: a network would have {self.channels} inputs; the limit is {MOST_INPUTS}")
        if not -LARGEST <= self.range[0] < self.range[1] <= LARGEST:
            raise ValueError(
                f"range {list(self.range)}: give the least and the greatest possible outcome of a regression"
            )
        if self.partition and self.partition.kind == "dirichlet" and self.kind == "regression":
            raise ValueError(
                "partition: dirichlet divides cases by class, and a regression has no classes; take iid or column"
            )
        return self

    # ----------------------------------------------------------------------------------------- the kind of task
    @property
    def outcomes(self) -> tuple[str, ...]:
        return (self.time, self.event) if self.kind == "survival" else (self.target,)

    @property
    def goal(self) -> Objective:
        return goal_of(self.kind, self.labels, self.range, self.score)

    @property
    def words(self) -> tuple[str, ...]:
        columns = [word for column in self.columns for word in (column.name, *column.levels)]
        return tuple(dict.fromkeys((*columns, *self.outcomes, *super().words)))

    @property
    def counted(self) -> tuple[str, ...]:
        """Names by which cases are counted: the classes, or, in a survival analysis, censored cases and events."""
        return EVENTS if self.kind == "survival" else self.labels

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def numbers(self) -> tuple[Column, ...]:
        return self.columns

    @property
    def channels(self) -> int:
        return self.read_numbers + (len(self.columns) if self.missing == "mark" else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels,)

    @property
    def input_names(self) -> tuple[str, ...]:
        each = [f"{one.name} = {level}" if level else one.name for one in self.columns for level in one.levels or ("",)]
        marks = [f"{column.name} is missing" for column in self.columns] if self.missing == "mark" else []
        return (*each, *marks)

    def default_network(self) -> Network:
        return Linear()

    # ------------------------------------------------------------------------------------------ from a file
    def completed(self, data: "SiteData") -> "SiteData":
        from medsilo.tasks.own import table_rows

        return table_rows.finished(self, data)

    def scales_of(self, raw: Tensor) -> Scales:
        """For each input, return the mean and the standard deviation with which the input is standardised.

        Inputs from categories are not standardised, so their mean is 0 and their standard deviation is 1. A missing
        number is replaced by the mean of its input.

        Args:
            raw: The inputs, [cases, inputs], where missing values are NaN.
        """
        means, deviations = torch.zeros(raw.shape[1]).double(), torch.ones(raw.shape[1]).double()
        place = 0
        for column in self.columns:
            if not column.levels:
                known = raw[:, place][~raw[:, place].isnan()]
                if self.standardise == "plan":
                    means[place], deviations[place] = float(column.mean or 0), float(column.deviation or 1)
                elif self.standardise == "none":
                    means[place] = column.mean or 0.0
                elif len(known):
                    means[place] = known.mean()
                    spread = float(known.std()) if len(known) > 1 else 0.0
                    deviations[place] = spread if spread > 0 else 1.0
            place += column.inputs
        return means, deviations

    def across_patients(self) -> str:
        return from_training_cases("column") if self.needs_scales else super().across_patients()

    @property
    def read_numbers(self) -> int:
        """Number of inputs without those that mark missing values."""
        return sum(column.inputs for column in self.columns)

    def own_scales(self, source: "DataSource") -> Scales:
        """Return the means and standard deviations over all rows of a hospital's table."""
        return self.scales_of(torch.from_numpy(self.rows(source.table_file(), source, outcome=False).inputs))

    def finished(self, raw: Tensor, scales: Scales) -> Tensor:
        """Replace missing values by the mean, and standardise all values. With `missing: mark`, add inputs that mark
        missing values.
        """
        known = raw.where(~raw.isnan(), scales[0])
        inputs = known if self.standardise == "none" else scaled(known, scales)
        if self.missing == "mark":
            first = [sum(column.inputs for column in self.columns[:place]) for place in range(len(self.columns))]
            inputs = torch.cat([inputs, raw[:, first].isnan().to(inputs.dtype)], 1)
        return inputs.float()

    def rows(self, path: Path, source: "DataSource", outcome: bool = True) -> "TableRows":
        """Read the cases in a table, and record problems of rows that can't be used as cases.

        With `outcome`, rows without an outcome are left out.
        """
        from medsilo.tasks.own import table_rows

        return table_rows.read_rows(self, path, source, outcome)

    def examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        from medsilo.tasks.own import table_rows

        return table_rows.examined(self, site, sites, source)
