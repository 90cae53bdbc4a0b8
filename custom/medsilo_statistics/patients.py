"""A hospital's patients as a question reads them: an array of numbers for each variable, NaN where one is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from medsilo.core.errors import DataError
from medsilo.registry import TABLES
from medsilo.tasks.sheet import Sheet, as_written
from medsilo.tasks.sources import DataSource
from medsilo_statistics.asked_question import Question, RegressionAsked, Variable

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Patients:
    """The patients of a hospital whom a question is about."""

    question: Question
    names: tuple[str, ...]
    values: Mapping[str, Floats]  # of categories: the places of their levels

    def __len__(self) -> int:
        return len(self.names)

    def only(self, mask: NDArray[np.bool_]) -> "Patients":
        """Return those of a mask."""
        names = tuple(name for name, own in zip(self.names, mask, strict=True) if own)
        return Patients(self.question, names, {name: own[mask] for name, own in self.values.items()})

    @cached_property
    def asked(self) -> "Patients":
        """Those whom the question is about."""
        chosen = self.only(self.question.filter.meets(self.values)) if self.question.filter else self
        return chosen.known((self.question.by,) if self.question.by else ())

    def known(self, names: tuple[str, ...]) -> "Patients":
        """Return those of whom all these variables are known."""
        return self.only(np.all([~np.isnan(self.values[name]) for name in names], 0)) if names else self

    def groups(self, by: str | None) -> list[NDArray[np.bool_]]:
        """Return who is in which level."""
        if by is None:
            return [np.ones(len(self), bool)]
        return [self.values[by] == place for place in range(len(self.question.levels_of(by)))]

    def scaled(self, name: str) -> Floats:
        """Return numbers as they are added: from -1 to 1 over the range."""
        own = self.question.variables[name]
        return (self.values[name] - own.middle) / own.half

    def places(self, name: str) -> NDArray[np.int64]:
        """Return the places of values on the grid of their variable's steps; 0 where one is missing."""
        own = self.question.variables[name]
        assert own.range
        found = np.rint((np.nan_to_num(self.values[name], nan=own.range[0]) - own.range[0]) / own.width)
        return np.minimum(found, own.places - 1).astype(np.int64)

    def matrix(self, model: RegressionAsked) -> Floats:
        """Return the matrix of a regression, without gaps: numbers scaled, categories as columns of 0 and 1."""
        own = self.columns(model.covariates)
        return own if model.kind == "cox" else np.concatenate([np.ones((len(self), 1)), own], 1)

    def columns(self, names: Sequence[str]) -> Floats:
        """Return columns of variables without gaps: numbers scaled, categories as columns of 0 and 1."""
        found: list[Floats] = [np.zeros((len(self), 0))]
        for name in names:
            levels = self.question.variables[name].levels
            own = [self.values[name] == place for place in range(1, len(levels))] if levels else [self.scaled(name)]
            found += [column.astype(np.float64)[:, None] for column in own]
        return np.concatenate(found, 1)


def read_patients(question: Question, source: DataSource, site: str) -> Patients:
    """Return all patients of a hospital: lines of its table, or images of a task."""
    own = own_columns(question, source, site)
    if question.task:
        names, cells = _of_images(question, source, site)
        source = source.model_copy(update={"decimal": "."})
    else:
        names, cells = _of_table(source, own)
    values = {}
    for name, variable in question.variables.items():
        if own[name] not in cells:
            raise DataError(f"nothing here tells {name!r}; name the column or element that does (columns)", own[name])
        told = [cell for cell in cells[own[name]] if cell not in source.missing]
        values[name] = _values(variable, cells[own[name]], source, source.levels.get(name, {}))
        if told and np.isnan(values[name]).all():
            raise DataError(f"no value of {name!r} is understood; correct its range or levels, or data.levels here")
    return Patients(question, names, values)


def own_columns(question: Question, source: DataSource, site: str) -> dict[str, str]:
    """Return the hospital's own column of each variable."""
    return {name: source.names.get(name, name) for name in question.variables} | question.columns.get(site, {})


def _of_table(source: DataSource, own: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    needed = {called: name for name, called in own.items()}
    read = Sheet().read(source.table_file(), needed, [source.columns.patient])
    if read.uneven or read.long:
        raise DataError(
            f"the table has {len(read.uneven) + len(read.long)} lines that can't be read; export it again",
            ", ".join([*read.uneven, *read.long][:5]),
        )
    place = read.columns.get(source.columns.patient)
    names = tuple(where if place is None else cells[place] for where, cells in read.lines)
    if len(set(names)) < len(names):
        raise DataError("a patient has several lines in the table, and a question is about patients; keep one of each")
    return names, {name: [cells[n] for _, cells in read.lines] for name, n in read.columns.items()}


def _of_images(question: Question, source: DataSource, site: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the columns of images. Of a patient with several the first counts, so that each sum has a patient once."""
    name = str(question.task["name"])
    tasks = TABLES["task"]
    if name not in tasks or tasks.package_of(name):
        raise DataError(f"task {name[:60]!r} is none of medsilo's own, about whose images may be asked")
    task = tasks[name].from_values(question.task, "the question's task")
    first: dict[str, Mapping[str, float | str]] = {}
    for patient, told in task.columns_of_cases(site, source):
        first.setdefault(patient, told)
    known = dict.fromkeys(column for one in first.values() for column in one)
    return tuple(first), {column: [_text(one.get(column, "")) for one in first.values()] for column in known}


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.12g}" if np.isfinite(value) else ""


def _values(variable: Variable, cells: list[str], source: DataSource, levels: Mapping[str, str | int]) -> Floats:
    """Return what cells stand for; NaN for those that stand for nothing."""
    own = {Sheet.level(key): Sheet.level(str(level)) for key, level in levels.items()}
    known = {Sheet.level(cell): n for n, called in enumerate(variable.levels.values()) for cell in called}
    known |= {Sheet.level(level): n for n, level in enumerate(variable.levels)}
    found = np.full(len(cells), np.nan)
    for number, cell in enumerate(cells):
        if cell in source.missing:
            continue
        value = _value(variable, as_written(cell, source.decimal), known, own)
        found[number] = np.nan if value is None else value
    return found


def _value(variable: Variable, cell: str, known: Mapping[str, int], own: Mapping[str, str]) -> float | None:
    number = Sheet.number(cell)
    if variable.range:
        return number if number is not None and variable.range[0] <= number <= variable.range[1] else None
    level = Sheet.level(cell)
    if (place := known.get(own.get(level, level))) is not None:
        return float(place)
    return float(np.searchsorted(variable.cuts, number)) if variable.cuts and number is not None else None
