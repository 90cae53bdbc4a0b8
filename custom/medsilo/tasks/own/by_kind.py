"""Rows and windows of a hospital's own, of which the plan says what is learned."""

from functools import cache
from typing import Literal, Self

from pydantic import Field, model_validator

from medsilo.tasks.classification import Classification
from medsilo.tasks.goal import Goal
from medsilo.tasks.own.columns import LARGEST, Text, as_level
from medsilo.tasks.own.own_data import OwnData
from medsilo.tasks.own.standardising import Standardise
from medsilo.tasks.regression import Regression
from medsilo.tasks.survival import Survival

Kind = Literal["classification", "regression", "survival"]


class ByKind(OwnData):
    """Numbers of a hospital's own, standardised or not, and what is learned of them."""

    kind: Kind = Field("classification", description="what is learned of a line")
    labels: tuple[Text, ...] = Field(
        ("no", "yes"), min_length=2, max_length=254, description="classes of a classification: 0, 1, ..."
    )
    range: tuple[float, float] = Field(
        (0.0, 1.0), description="the least and the greatest number of a regression that is possible"
    )
    standardise: Standardise = Field(
        "site",
        description="numbers less their mean, divided by their standard deviation: of each site's training cases, or "
        "those that the plan gives with each",
    )

    @model_validator(mode="after")
    def _kind_agrees(self) -> Self:
        if len({as_level(label) for label in self.labels}) < len(self.labels):
            raise ValueError(f"labels {list(self.labels)}: name each once")
        if not -LARGEST <= self.range[0] < self.range[1] <= LARGEST:
            raise ValueError(f"range {list(self.range)}: give the least and the greatest number of a regression")
        if self.partition and self.partition.kind == "dirichlet" and self.kind == "regression":
            raise ValueError("partition: dirichlet deals classes, and a regression has none; take iid or column")
        return self

    @property
    def goal(self) -> Goal:
        return goal_of(self.kind, self.labels, self.range)


@cache
def goal_of(kind: Kind, labels: tuple[str, ...], limits: tuple[float, float], outputs: int | None = None) -> Goal:
    """Return what is learned of these classes, or of numbers between these limits. outputs: of a classification."""
    if kind == "classification":
        return Classification(labels, outputs)
    return Regression(limits) if kind == "regression" else Survival()
