"""A hospital's own table in a plan's words: a line per case. table_rows.py reads it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core import optional
from medsilo.models.architectures import Linear
from medsilo.models.network import Network
from medsilo.tasks.classification import Classification
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
from medsilo.tasks.survival import EVENTS, Survival

if TYPE_CHECKING:  # only a site reads cases
    from medsilo.tasks.own.table_rows import TableRows
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey

MOST_INPUTS = 20_000
Kind = Literal["classification", "regression", "survival"]


@cache
def goal_of(kind: Kind, labels: tuple[str, ...], limits: tuple[float, float]) -> Objective:
    """Return what is learned of these classes, or of numbers between these limits."""
    if kind == "classification":
        return Classification(labels, 1 if len(labels) == 2 else None)
    return Regression(limits) if kind == "regression" else Survival()


class PatientTable(Standardised):
    """The agreement of sites that learn from tables of their own. Where a table lies is each site's own affair."""

    title: ClassVar[str] = "A hospital's own table: classification, regression or survival"
    use: ClassVar[Inference] = Inference("tables")
    evaluation_batch: ClassVar[int] = 1_000_000  # a table lies in memory, and concordance compares all cases of a part

    name: Literal["table"] = "table"
    kind: Kind = Field("classification", description="what is learned of a line")
    range: tuple[float, float] = Field(
        (0.0, 1.0), description="the least and the greatest number of a regression that is possible"
    )
    columns: tuple[Column, ...] = Field(
        default=(Column(name="age"),),
        min_length=1,
        max_length=MOST_COLUMNS,
        description="what the network reads: names of columns with numbers, or `{name: ..., levels: [...]}` of "
        "categories",
    )
    target: Text = Field(default="outcome", description="column with the class, or with the number of a regression")
    time: Text = Field("time", description="of survival: column with the time until the event or the last visit")
    event: Text = Field("event", description="of survival: column with 1 (event) or 0 (censored)")
    missing: Literal["leave-out", "mean", "mark"] = Field(
        "leave-out",
        description="lines with a value missing: left out; or the site's training mean takes its place (a category is "
        "none of its levels); or that and one input more per column, which is 1 there",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        names = [column.name for column in self.columns]
        outcomes = self._outcomes
        if twice := sorted(name for name, count in Counter([*names, *outcomes]).items() if count > 1):
            raise ValueError(f"column {twice[0]!r} is named twice; name each once, and no outcome among the columns")
        if self.channels > MOST_INPUTS:
            raise ValueError(f"columns: a network would read {self.channels} numbers of a case; {MOST_INPUTS} may be")
        if not -LARGEST <= self.range[0] < self.range[1] <= LARGEST:
            raise ValueError(f"range {list(self.range)}: give the least and the greatest number of a regression")
        if self.partition and self.partition.kind == "dirichlet" and self.kind == "regression":
            raise ValueError("partition: dirichlet deals classes, and a regression has none; take iid or column")
        return self

    # ------------------------------------------------------------------------------------------ what kind it is
    @property
    def _outcomes(self) -> tuple[str, ...]:
        """The columns that are learned."""
        return (self.time, self.event) if self.kind == "survival" else (self.target,)

    @property
    def goal(self) -> Objective:
        return goal_of(self.kind, self.labels, self.range)

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of what is counted of cases: their classes, or that the event came or did not."""
        return EVENTS if self.kind == "survival" else self.labels

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        return () if self.missing == "leave-out" else tuple(column.name for column in self.columns)

    @property
    def numbers(self) -> tuple[Column, ...]:
        return self.columns

    @property
    def channels(self) -> int:
        """The numbers that a network reads of a case."""
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
    def _finished(self, data: "SiteData") -> "SiteData":
        return optional.table_rows.finished(self, data)

    def scales_of(self, raw: Tensor) -> Scales:
        """Return what is subtracted of each input and what it is divided by. raw: [cases, inputs], NaN where unknown.

        Categories stay as they are. A number that is missing becomes the mean, by either rule.
        """
        means, deviations = torch.zeros(raw.shape[1]).double(), torch.ones(raw.shape[1]).double()
        place = 0
        for column in self.columns:
            if not column.levels:
                known = raw[:, place][~raw[:, place].isnan()]
                if self.standardise == "plan":
                    means[place], deviations[place] = float(column.mean or 0), float(column.deviation or 1)
                elif len(known):
                    means[place] = known.mean()
                    spread = float(known.std()) if len(known) > 1 and self.standardise == "site" else 0.0
                    deviations[place] = spread if spread > 0 else 1.0
            place += column.inputs
        return means, deviations

    def across_patients(self) -> str:
        return from_training_cases("column") if self.needs_scales else super().across_patients()

    @property
    def needs_scales(self) -> bool:
        """Return whether a hospital's own numbers are needed to read its cases."""
        return self.standardise == "site" or (self.standardise == "none" and self.missing != "leave-out")

    @property
    def read_numbers(self) -> int:
        """The numbers that are read of a line, without marks."""
        return sum(column.inputs for column in self.columns)

    def own_scales(self, source: "DataSource") -> Scales:
        """Return `scales_of` all lines of a hospital's table."""
        return self.scales_of(self.rows(source.table_file(), source, outcome=False).as_read)

    def finished(self, raw: Tensor, scales: Scales) -> Tensor:
        """Return what the network reads: standardised, with missing values as the plan has it."""
        known = raw.where(~raw.isnan(), scales[0])
        inputs = known if self.standardise == "none" else scaled(known, scales)
        if self.missing == "mark":
            first = [sum(column.inputs for column in self.columns[:place]) for place in range(len(self.columns))]
            inputs = torch.cat([inputs, raw[:, first].isnan().to(inputs.dtype)], 1)
        return inputs.float()

    def rows(self, path: Path, source: "DataSource", outcome: bool = True) -> "TableRows":
        """Return the cases of a table as numbers, and what is wrong with others.

        outcome: whether it is read, too; without it, no line is left out for the lack of one.
        """
        return optional.table_rows.TableRows(self, path, source, outcome)

    def _examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        return optional.table_rows.examined(self, site, sites, source)
