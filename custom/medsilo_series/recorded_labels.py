"""Meaning of what a hospital's recordings say is learned: classes, numbers, or times and events."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medsilo.extend import BETWEEN, ByKind, DataSource, columns, survival


@dataclass(frozen=True)
class KnownLabels:
    """Meaning of a site's labels."""

    missing: frozenset[str]
    stranger: str  # what is said where a label stands for nothing
    stored: type[np.generic]  # how numbers are kept

    @classmethod
    def of(cls, task: ByKind, source: DataSource) -> "KnownLabels":
        """Return what a plan's labels are at this site: classes, numbers within its range, or times and events."""
        missing = frozenset(source.missing)
        if task.kind == "regression":
            low, high = task.range
            what = f"recordings have a label that is not a number from {low:g} to {high:g}; correct it"
            return _KnownValues(missing, what, np.float32, task.range, source.decimal)
        if task.kind == "survival":
            what = "recordings have a time that is no number from 0 on, or an event of another name than the plan's"
            what += f" ({', '.join(survival.EVENTS)}); correct it, or say in data.label_map what events are called here"
            return _KnownOutcomes(
                missing, what, np.float32, columns.own_labels(survival.EVENTS, source.first_map), source.decimal
            )
        what = f"recordings have a label that is not among the plan's ({', '.join(task.labels)})"
        return _KnownClasses(missing, f"{what}; add it to data.label_map", np.uint8, _numbers(task.labels, source))

    def number(self, label: str) -> float | None:
        """Return what a label stands for; nan where nothing is learned from it, None where nobody knows it."""
        return math.nan if label in self.missing else None

    def learned(self, label: str) -> float | None:
        """Return what is learned from a label; None where nothing is."""
        number = self.number(label)
        return None if number is None or math.isnan(number) else number

    def values(self, label: str) -> Any:
        """Return a window's target; None where nothing is learned from its label."""
        return self.learned(label)

    def group(self, label: str) -> str:
        """Return what patients with this label have in common with others, where it is no class."""
        return ""


@dataclass(frozen=True)
class _KnownClasses(KnownLabels):
    """The plan's classes by what a site calls them."""

    numbers: Mapping[str, float]

    def number(self, label: str) -> float | None:
        found = self.numbers.get(columns.as_level(label))
        return super().number(label) if found is None else found


@dataclass(frozen=True)
class _KnownValues(KnownLabels):
    """The numbers that a regression can have."""

    range: tuple[float, float]
    decimal: str

    def number(self, label: str) -> float | None:
        value = columns.as_number(columns.as_written(label, self.decimal))
        within = value is not None and self.range[0] <= value <= self.range[1]
        return value if within else super().number(label)


@dataclass(frozen=True)
class _KnownOutcomes(KnownLabels):
    """Times, and whether the event came."""

    events: Mapping[str, int]
    decimal: str

    def number(self, label: str) -> float | None:
        """Return 1 where the event came, 0 where it had not yet."""
        time, _, event = label.partition(BETWEEN)
        if {time, event} & self.missing:
            return math.nan
        value = columns.as_number(columns.as_written(time, self.decimal))
        return None if value is None or not 0 <= value <= columns.LARGEST else self.events.get(columns.as_level(event))

    def values(self, label: str) -> Any:
        event = self.learned(label)
        return (
            None
            if event is None
            else (columns.as_number(columns.as_written(label.partition(BETWEEN)[0], self.decimal)), event)
        )

    def group(self, label: str) -> str:
        return str(self.number(label))


def _numbers(names: Sequence[str], source: DataSource) -> dict[str, float]:
    """Return the plan's classes by what a site calls them; nan where nothing is learned."""
    said = source.first_map
    known: dict[str, float] = dict(
        columns.own_labels(names, {own: plans for own, plans in said.items() if plans != ""})
    )
    return known | {columns.as_level(str(own)): math.nan for own, plans in said.items() if plans == ""}
