"""A hospital's own numbers: columns of tables, signals of recordings, and what a plan learns of them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.errors import DataError
from medsilo.core.section import Section
from medsilo.tasks.classification import Classification
from medsilo.tasks.objective import Objective
from medsilo.tasks.own.own_data import OwnData, OwnFolder
from medsilo.tasks.regression import Regression
from medsilo.tasks.site_data import SiteData
from medsilo.tasks.sources import DataSource, as_tuple
from medsilo.tasks.survival import EVENTS, Survival
from medsilo.tasks.table_reader import TableReader

Text = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
LARGEST = 1e9


class Column(Section):
    """One column: numbers, or categories where `levels` are given. Every hospital reads it in the same way."""

    name: Text = Field(description="its name in the plan; a hospital says in `data.columns` what it is called there")
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
        if self.levels and len({TableReader.level(level) for level in self.levels}) < max(2, len(self.levels)):
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

        own: this hospital's levels, as `TableReader.level` has them, to the plan's.
        """
        if self.levels:
            places = {TableReader.level(level): place for place, level in enumerate(self.levels)}
            place = places.get(TableReader.level(own.get(TableReader.level(cell), cell)))
            return None if place is None else [float(place == other) for other in range(len(self.levels))]
        value = TableReader.number(cell)
        return [value] if value is not None and self.low <= value <= self.high else None


def _named(value: Any) -> Any:
    """Return a column of numbers that is given by its name alone."""
    return Column(name=value) if isinstance(value, str) else value


ReadColumns = Annotated[tuple[Annotated[Column, BeforeValidator(_named)], ...], Field(min_length=1, max_length=5000)]


def own_labels(names: Sequence[str], label_map: Mapping[str | int, str | int]) -> dict[str, int]:
    """Return the plan's classes by what a site calls them, as `TableReader.level` has it."""
    known = {TableReader.level(label): number for number, label in enumerate(names)}
    if all(TableReader.number(label) is None for label in names):
        known |= {str(number): number for number in range(len(names))}
    for own, plans in label_map.items():
        if TableReader.level(str(plans)) not in known:
            raise DataError(f"data.label_map: a value is not among the plan's labels: {', '.join(names)}", str(plans))
        known[TableReader.level(str(own))] = known[TableReader.level(str(plans))]
    return known


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
        if len({TableReader.level(label) for label in self.labels}) < len(self.labels):
            raise ValueError(f"labels {list(self.labels)}: name each once")
        if not -LARGEST <= self.range[0] < self.range[1] <= LARGEST:
            raise ValueError(f"range {list(self.range)}: give the least and the greatest number of a regression")
        if self.partition and self.partition.kind == "dirichlet" and self.kind == "regression":
            raise ValueError("partition: dirichlet deals classes, and a regression has none; take iid or column")
        lacking = [one.name for one in self.numbers if not one.levels and None in (one.mean, one.deviation)]
        if self.standardise == "plan" and lacking:
            raise ValueError(f"standardise: plan needs mean and deviation of every number; {lacking[0]!r} lacks them")
        return self

    @property
    def goal(self) -> Objective:
        return goal_of(self.kind, self.labels, self.range)

    @property
    @abstractmethod
    def numbers(self) -> Sequence[Column]:
        """The columns that a network reads."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the numbers that a network reads, in turn."""
        return tuple(one.name for one in self.numbers)

    @property
    def largest_input(self) -> float:
        """By how numbers are standardised."""
        if self.standardise != "none":
            return FURTHEST
        return max(1.0, *(max(abs(one.low), abs(one.high)) for one in self.numbers if not one.levels))

    @property
    def needs_scales(self) -> bool:
        """Return whether a hospital's own numbers are needed to read its cases."""
        return self.standardise == "site"

    def scales_that_were(self, told: Mapping[str, Sequence[float]]) -> Scales:
        """Return what a survey told of `scales_of`."""
        names = self.input_names[: sum(one.inputs for one in self.numbers)]  # before marks of those that are missing
        means, deviations = torch.tensor([told[name] for name in names], dtype=torch.float64).unbind(1)
        return means, deviations

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of what is counted of cases: their classes, or that the event came or did not."""
        return EVENTS if self.kind == "survival" else self.labels


@cache
def goal_of(kind: Kind, labels: tuple[str, ...], limits: tuple[float, float], outputs: int | None = None) -> Objective:
    """Return what is learned of these classes, or of numbers between these limits. outputs: of a classification."""
    if kind == "classification":
        return Classification(labels, outputs)
    return Regression(limits) if kind == "regression" else Survival()


AT_ONCE = 256  # windows that are measured together


class SignalFolder(OwnFolder, ByKind):
    """A task over signals in files: numbers in steps of time, standardised by each site or by the plan, and classes.

    A subclass says how its cases, [signals, steps], are read of files; with values as these have them.

    >>> class Breath(SignalFolder):
    ...     def default_network(self): ...
    ...     def cases_in(self, files): return torch.tensor([[float(text) for text in files[0].read_text().split()]])
    >>> breath = Breath(name="breath", signals=["flow"], labels=["even", "uneven"])
    >>> breath.channels, breath.limits, breath.standardise
    (1, {'flow': (-1000000000.0, 1000000000.0)}, 'site')
    """

    kind: Literal["classification"] = Field("classification", description="what is learned of a window")
    signals: ReadColumns = Field(
        default=(Column(name="signal"),),
        description="what the network reads: names of columns with numbers, in turn; `{name: ..., low: 0, high: 300}` "
        "bounds them",
    )

    @model_validator(mode="after")
    def _are_numbers(self) -> Self:
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals {names}: name each once")
        if levels := [signal.name for signal in self.signals if signal.levels]:
            raise ValueError(f"signals: {levels[0]!r} has levels, and signals are numbers; remove them")
        return self

    @property
    def numbers(self) -> tuple[Column, ...]:
        return self.signals

    @property
    def channels(self) -> int:
        """The signals."""
        return len(self.signals)

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest number that is possible, of each signal by its name, in turn."""
        return {one.name: (one.low, one.high) for one in self.signals}

    def known_labels(self, source: DataSource) -> dict[str, int | None]:
        """Return the plan's classes by what a site calls them (`TableReader.level`); None where nothing is learned."""
        said = source.first_map
        known = own_labels(self.labels, {own: plans for own, plans in said.items() if plans != ""})
        nothing = dict.fromkeys(TableReader.level(str(own)) for own, plans in said.items() if plans == "")
        return {**dict.fromkeys(map(TableReader.level, source.missing)), **known, **nothing}

    # ------------------------------------------------------------------------------------------ standardised
    def across_patients(self) -> str:
        return from_training_cases("signal") if self.needs_scales else super().across_patients()

    def scales_of(self, blocks: Iterable[Tensor]) -> Scales:
        """Return what is subtracted of each signal and what it is divided by. blocks: windows, some at a time."""
        means, deviations = torch.zeros(self.channels).double(), torch.ones(self.channels).double()
        if self.standardise == "plan":
            means = torch.tensor([float(one.mean or 0) for one in self.signals], dtype=torch.float64)
            deviations = torch.tensor([float(one.deviation or 1) for one in self.signals], dtype=torch.float64)
        elif self.standardise == "site":
            means, deviations = _spread(blocks, self.channels)
        return means, deviations

    def finished(self, windows: Tensor, scales: Scales) -> Tensor:
        """Return what the network reads of windows [..., signals, steps]."""
        if self.standardise == "none":
            return windows
        return scaled(windows.double().transpose(-1, -2), scales).transpose(-1, -2).float().contiguous()

    def _finished(self, data: SiteData) -> SiteData:
        if self.standardise == "none":
            return data
        known = data.train if len(data.train) else data.test  # type: ignore[arg-type]
        scales = self.scales_of(_blocks(known))
        train, validation, test = (_Finished(self, own, scales) for own in (data.train, data.validation, data.test))
        told = {name: (float(a), float(b)) for name, a, b in zip(self.input_names, *scales, strict=True)}
        surveyed = data.survey and replace(data.survey, scales=told)
        return replace(data, train=train, validation=validation, test=test, survey=surveyed)


class _Finished(Dataset):
    """Windows as a network reads them."""

    def __init__(self, task: SignalFolder, data: Dataset, scales: Scales) -> None:
        self.task, self.data, self.scales = task, data, scales
        self.patients, self.labels = data.patients, data.labels  # type: ignore[attr-defined]
        self.records = getattr(data, "records", None)

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return self.task.finished(inputs, self.scales), target


def _blocks(data: Dataset) -> Iterator[Tensor]:
    """Yield a data set's windows, some at a time."""
    count = len(data)  # type: ignore[arg-type]
    for first in range(0, count, AT_ONCE):
        yield torch.stack([data[place][0] for place in range(first, min(first + AT_ONCE, count))])


def _spread(blocks: Iterable[Tensor], signals: int) -> Scales:
    """Return each signal's mean and standard deviation (n - 1) over all steps of all windows; 1 where all are alike."""
    count, means, squares = 0, torch.zeros(signals).double(), torch.zeros(signals).double()
    for block in blocks:
        values = block.double().transpose(1, 2).reshape(-1, signals)
        more, apart = len(values), values.mean(0) - means
        squares += (values - values.mean(0)).square().sum(0) + apart.square() * count * more / (count + more)
        means, count = means + apart * more / (count + more), count + more
    deviations = (squares / max(count - 1, 1)).sqrt()
    return means, deviations.where(deviations > 0, torch.ones(signals).double())
