"""Read the rows of a hospital's table as cases. Only sites import this module.

The table and the hospital's settings alone determine which rows are cases: a plan can't exclude rows.

A number outside the plan's limits for its column counts as missing. If a category in the table is not among the plan's
levels, all inputs of the column are 0.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.tasks.case_index import OTHER_NAMES
from medsilo.tasks.cells import level, without_thousands
from medsilo.tasks.columns import Columns, TextColumn, at_limits, filled, lines_of_totals, read_columns, span
from medsilo.tasks.own.own_numbers import LARGEST, Column, own_labels
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.own.reading import drawn_parts, needed, note_empty_parts, told_in
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import Cases, SiteData, patients_of
from medsilo.tasks.sources import RARE, DataSource
from medsilo.tasks.splits import deal
from medsilo.tasks.survey import PartFacts, Problem, Survey
from medsilo.tasks.table_reader import OLD_LETTERS, WINDOWS

TWICE = "lines of one patient are there twice, alike in all that is read; remove the copies"
ALIKE = "lines are alike in every column and count as one patient; name the patient, or remove what is a copy"
CODE = "lines have the same negative number of {!r}, as registries write 'not known'; if so, add it to data.missing"
CODES = ({"-9"}, {"-99"}, {"-999"})
ALONE = (
    "every line counts as a patient of its own; if a patient has several, say which column names the patient "
    "(data.columns.patient)"
)


def finished(task: PatientTable, data: SiteData) -> SiteData:
    """Standardise the inputs of all cases, and record the means and standard deviations in the survey."""
    parts: dict[str, Cases] = {part: getattr(data, part) for part in PARTS}
    known = parts["train"] if len(parts["train"]) else parts["test"]  # an evaluation site may have no training cases
    scales = task.scales_of(known.inputs)
    read = [(task.finished(own.inputs, scales), own.targets, own.patients) for own in parts.values()]
    told = {name: (float(a), float(b)) for name, a, b in zip(task.input_names, *scales, strict=False)}
    survey = data.survey and replace(data.survey, scales=told)
    return replace(SiteData.in_memory(read), survey=survey)


def examined(
    task: PatientTable, site: str, sites: Sequence[str], source: DataSource | None
) -> tuple[Survey, dict[str, Cases]]:
    """Read a site's table; return the survey, and the training, validation and test part of the data before
    standardisation.
    """
    task.check_source(source)
    assert source is not None
    if source.images or source.labels or source.patient or source.head or source.cache_folder:
        raise DataError(
            "data: a table has no images, labels, patient pattern, head or cache on the disk; leave these keys out, "
            "and name columns under data.columns"
        )
    path = source.table_file(source.folder_of(site, task.deals))
    rows = _read(task, path, source) if task.partition is None else _dealt(task, path, source, site, sorted(sites))
    parts = rows.divided(source)
    cases = {part: rows.cases(parts[part]) for part in PARTS}
    return survey_of(task, rows, cases, source), cases


def _read(task: PatientTable, path: Path, source: DataSource) -> "TableRows":
    return task.rows(path, source).without(source.without())


# A table is read once for all simulated sites; here, rows wait until their site asks for them
_WAITING: dict[tuple[Any, ...], dict[str, "TableRows"]] = {}


def _dealt(task: PatientTable, path: Path, source: DataSource, site: str, sites: Sequence[str]) -> "TableRows":
    """Divide a table's cases among simulated sites, and return the cases of one of these sites.

    The table is read once for all simulated sites; the cases of each site are stored until the site requests them.
    """
    state = path.stat()
    told = source.model_dump_json(), source.split, source.each_alone, source.without()
    key = (task.model_dump_json(), path, state.st_size, state.st_mtime_ns, told, *sites)
    if key not in _WAITING or site not in _WAITING[key]:
        rows = _read(task, path, source)
        natural = rows.sites.texts() if rows.sites else []
        assert task.partition
        owners = deal(task.partition, rows.patients.texts(), rows.labels.tolist(), natural, sites)
        _WAITING.clear()
        _WAITING[key] = {
            one: replace(
                rows.taken(owner), problems=[*rows.problems], odd={**rows.odd}, identifiers={**rows.identifiers}
            )
            for one, owner in zip(sites, owners, strict=True)
        }
    return _WAITING[key].pop(site)


def survey_of(task: PatientTable, rows: "TableRows", cases: Mapping[str, Cases], source: DataSource) -> Survey:
    shown = {part: part_of(task, case) for part, case in cases.items()}
    note_empty_parts(task, rows.problems, shown, source)
    if task.kind == "survival":
        scored = [part for part in needed(source) if part != "train"]
        rows.problems += incomparable({part: cases[part].targets for part in scored})
    if copies := rows.copies():
        rows.problems.append(Problem("note", TWICE if rows.patients_named else ALIKE, copies))
    return told_in(task, rows, shown, source)


def part_of(task: PatientTable, data: Cases) -> PartFacts:
    """Count the cases, the patients and the labels of one part (training, validation or test)."""
    counts: dict[str, int] = {}
    if task.kind != "regression":
        labels = data.targets[:, 1] if task.kind == "survival" else data.targets
        known = torch.bincount(labels.long(), minlength=len(task.counted)).tolist()
        counts = dict(zip(task.counted, known, strict=True))
    return PartFacts(len(data), len(set(patients_of(data))), counts)


def incomparable(targets: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield a problem for each given part of the data in which no two cases can be compared, so that the concordance
    index is undefined.
    """
    for part, target in targets.items():
        times, censored = target[:, 0], target[:, 1] == 0
        if len(target) and (censored.all() or not _seen_longer(times, censored).any()):
            what = f"the {part} part has no two cases to compare, an event and a longer time; bring more cases"
            yield Problem("stops", what)


def _seen_longer(times: Tensor, censored: Tensor) -> Tensor:
    """Return a Boolean tensor [cases]: true for cases that were observed longer than the earliest event.

    Only such cases can be compared with an event.
    """
    first = times[~censored].min()
    return (times > first) | ((times == first) & censored)


@dataclass
class TableRows:
    """The rows of a table that are cases, with the patient, the inputs and the outcome of each case."""

    task: PatientTable
    table: Columns
    lines: np.ndarray  # for each case, the index of the row in the table, [cases]
    inputs: np.ndarray  # [cases, inputs]; missing and invalid values are NaN
    outcomes: np.ndarray  # [cases, 1], or, for survival analysis, [cases, 2] with time and event
    labels: np.ndarray  # [cases]: the class's index; in a survival analysis, 1 for an event; in a regression, 0
    classes: TextColumn  # names of classes, as the hospital spells them
    patients: TextColumn
    parts: TextColumn | None
    sites: TextColumn | None
    # for each kind of invalid value, a Boolean array [rows]: whether the row has such a value
    odd: Mapping[str, np.ndarray]
    patients_named: bool = True
    problems: list[Problem] = field(default_factory=list)
    identifiers: dict[str, int] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """True if the table assigns patients to training, validation or test."""
        return self.parts is not None and any(self.parts.shown().values)

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the cases' rows in messages, such as "line 12"."""
        return self.table.lines_called(self.lines)

    def taken(self, cases: np.ndarray) -> "TableRows":
        per_case = ("lines", "inputs", "outcomes", "labels", "classes", "patients", "parts", "sites")
        own = {name: getattr(self, name) for name in per_case}
        taken: dict[str, Any] = {name: None if values is None else values[cases] for name, values in own.items()}
        return replace(self, **taken)

    def without(self, patients: Collection[str]) -> "TableRows":
        """Leave out the cases of the given patients, without recording a problem."""
        return self.taken(np.flatnonzero(~self.patients.isin({*patients}))) if patients else self

    def cases(self, cases: np.ndarray) -> Cases:
        """Return the given cases as tensors, without standardised inputs."""
        inputs, outcomes = torch.from_numpy(self.inputs[cases]), torch.from_numpy(self.outcomes[cases])
        if self.task.kind == "survival":
            targets = outcomes.float()
        else:
            targets = outcomes[:, 0].to(torch.long if self.task.kind == "classification" else torch.float32)
        return Cases(inputs, targets, self.patients[cases].texts())

    def divided(self, source: DataSource) -> dict[str, np.ndarray]:
        """Return the indices of the training, validation and test cases, by the table or by the hospital's split of
        patients.
        """
        patients = self.patients.shown()
        fixed: dict[str, str] | None = None
        if self.fixed:
            assert self.parts
            fixed = self._fixed(patients, self.parts.shown())
        drawn = drawn_parts(
            self.class_of_each(patients), fixed, source, self.task.shares, self.task.split, self.problems
        )
        place = np.array([PARTS.index(drawn[name]) if drawn[name] in PARTS else -1 for name in patients.values])
        of_case = place[patients.codes] if len(place) else np.zeros(0, int)
        return {part: np.flatnonzero(of_case == number) for number, part in enumerate(PARTS)}

    def _fixed(self, patients: TextColumn, parts: TextColumn) -> dict[str, str]:
        """Return the part (training, validation or test) that the table assigns to each patient. Record invalid
        assignments, and patients whom the table assigns to two parts.
        """
        if any(value not in PARTS for value in parts.values):
            strangers = self.lines[~parts.isin({*PARTS})]
            what = "lines of the table have a part that is not train, validation or test"
            self.problems.append(Problem("stops", what, len(strangers), self.table.lines_called(strangers)))
        pairs = np.unique(np.stack([patients.codes, parts.codes]), axis=1)
        several = np.flatnonzero(np.bincount(pairs[0]) > 1)
        if len(several):
            what = "patients are in two parts by the table, so that the test would be of known patients; "
            names = tuple(sorted(patients.values[place] for place in several.tolist()))
            self.problems.append(Problem("stops", f"{what}give each one part", len(names), names))
        return {patients.values[who]: parts.values[part] for who, part in pairs.T.tolist()}

    def class_of_each(self, patients: TextColumn) -> dict[str, str]:
        """For each patient, return the most frequent class of the patient's cases, as the hospital names the class.

        The plan's names of classes are not used, because the split must not depend on the plan.
        """
        order = np.argsort(np.argsort(self.classes.values, kind="stable"), kind="stable")
        ranks = order[self.classes.codes] if len(self.classes.values) else np.zeros(len(self.lines), int)
        width = max(1, len(order))
        pairs, counts = np.unique(patients.codes.astype(np.int64) * width + ranks, return_counts=True)
        found: dict[int, tuple[int, int]] = {}
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            who, rank = divmod(pair, width)
            found[who] = min(found.get(who, (0, 0)), (-count, rank))
        names = sorted(self.classes.values)
        return {patients.values[who]: names[rank] for who, (_, rank) in found.items()}

    def copies(self) -> int:
        """Count repeated rows. A row is repeated if an earlier row of the same patient is equal in all columns that the
        plan reads.
        """
        # True for each row of a patient who has several rows
        again = np.bincount(self.patients.codes)[self.patients.codes] > 1
        rows = np.column_stack([self.inputs, self.outcomes, self.patients.codes])[again]
        return len(rows) - len(np.unique(np.ascontiguousarray(rows).view(np.dtype((np.void, rows.strides[0]))), axis=0))


class _Reading:
    """Reads a table for a task: the hospital's settings select the rows, and the plan selects the columns."""

    def __init__(self, task: PatientTable, path: Path, source: DataSource, outcome: bool) -> None:
        self.task, self.source, self.outcome = task, source, outcome
        self.problems: list[Problem] = []
        self.odd: dict[str, np.ndarray] = {}
        self.missing = frozenset(source.missing)
        absent = task.absent(source)
        self.read = [column for column in task.columns if column.name not in absent]
        columns = [*(one.name for one in self.read), *(task.outcomes if outcome else ())]
        self.roles = {role: source.column(role) for role in ("patient", "part", "site")}
        self.called = source.own_names(columns, self.roles, "columns", (*task.outcomes, *absent))
        required = {own: name for name, own in self.called.items() if name not in source.spans}
        required |= {own: name for name in self.called for own in source.spans.get(name, ())}
        if "patient" in source.columns:
            required[self.roles["patient"]] = "patient"
        learned = [self.called[name] for name in task.outcomes] if outcome else []
        if source.outcome and (others := [name for name in learned if name not in source.outcome]):
            raise DataError(
                f"the plan predicts {' and '.join(map(repr, task.outcomes))}, which is not the outcome of this "
                "hospital's data set",
                private=f"{others[0]}; data.outcome has {', '.join(source.outcome)}",
            )
        if outcome and source.learned_as not in (None, task.kind):
            raise DataError(
                f"the plan's kind of prediction is {task.kind}, but this hospital's data set declares "
                f"{source.learned_as}"
            )
        self.table = read_columns(path)
        self.table.require(required, tuple(self.roles.values()))

    def rows(self) -> TableRows:
        named = self.table.find(self.roles["patient"]) is not None
        patients = self._role("patient") if named else self.table.line_names()
        assert patients
        parts, sites = self._role("part"), self._role("site")
        kept = np.ones(self.table.count, bool)
        nobody = lines_of_totals([patients, *([sites] if sites else [])], self.table.count)
        if named:
            nobody |= patients.isin({"", *self.missing})
        self._leave_out(kept, "lines have no patient, or are totals; fill it in, or remove them", nobody)
        for name in self.source.required:
            if (own := self.table.find(name)) is None:
                raise DataError("data.required names a column that the table lacks; correct it", private=name)
            lacking = self.table.column(own).isin(self.missing)
            self._leave_out(kept, f"lines have no value of {name!r}, which this hospital requires", lacking)
        # also for outcomes that this plan does not predict, so that all plans use the same rows
        for name in self.source.outcome if self.outcome else ():
            if (own := self.table.find(name)) is not None:
                self._leave_out(kept, "lines have no outcome", self.table.column(own).isin(self.missing))
        outcomes, labels, classes = self._outcomes(kept, patients) if self.outcome else self._nothing()
        inputs = self._inputs(kept)
        self._tell_table()
        if named is False and kept.any():
            self.problems.append(Problem("note", ALONE, int(kept.sum())))
        if parts:
            called = (value.lower() for value in parts.values)
            parts = TextColumn(tuple(OTHER_NAMES.get(value, value) for value in called), parts.codes)
        if sites:
            sites = TextColumn(sites.levels(), sites.codes)
        every = TableRows(
            self.task, self.table, np.arange(self.table.count), inputs, outcomes, labels, classes, patients, parts,
            sites, self.odd, named, self.problems,
        )  # fmt: skip
        return every.taken(np.flatnonzero(kept))

    def _role(self, role: str) -> TextColumn | None:
        own = self.table.find(self.roles[role])
        return None if own is None else self.table.column(own)

    def _own(self, name: str) -> TextColumn:
        return self.table.column(str(self.table.find(name)))

    def _column(self, name: str) -> TextColumn:
        if name in self.source.spans:
            return span(*map(self._own, self.source.spans[name]))
        column, patients = self._own(self.called[name]), self._role("patient")
        if self.called[name] in self.source.limits:
            column = at_limits(column)
        if self.called[name] in self.source.fill and patients:
            return filled(column, patients, self.missing)
        return column

    def _lacks(self, name: str, column: TextColumn) -> np.ndarray:
        codes = frozenset(map(level, self.source.codes.get(name, ())))
        if not codes:
            return column.isin(self.missing)
        lacking = [
            value in self.missing or one in codes for value, one in zip(column.values, column.levels(), strict=True)
        ]
        return np.array(lacking, bool)[column.codes] if lacking else np.zeros(0, bool)

    # ---------------------------------------------------- select the rows that are cases
    def _leave_out(self, mask: np.ndarray, reason: str, lines: np.ndarray) -> None:
        """Leave out the given rows, and record those that were not left out before."""
        self._note("left out", reason, lines & mask)
        mask &= ~lines

    def _nothing(self) -> tuple[np.ndarray, np.ndarray, TextColumn]:
        count = self.table.count
        return np.zeros((count, 1)), np.zeros(count, int), TextColumn(("",), np.zeros(count, int))

    def _outcomes(self, mask: np.ndarray, patients: TextColumn) -> tuple[np.ndarray, np.ndarray, TextColumn]:
        """For each row, return the outcome, the index of the class in the plan, and the hospital's name of the
        class.
        """
        task, columns = self.task, [self._column(name) for name in self.task.outcomes]
        for name, column in zip(task.outcomes, columns, strict=True):
            self._leave_out(mask, "lines have no outcome", self._lacks(name, column))
        numbers = np.zeros(self.table.count)
        if task.kind != "classification":
            low, high = (0.0, LARGEST) if task.kind == "survival" else (-LARGEST, LARGEST)
            numbers = self._numbers(task.outcomes[0], columns[0])
            wrong = ~((numbers >= low) & (numbers <= high))
            what = f"lines have an outcome that is not a number from {low:g} to {high:g}; correct it"
            self._leave_out(mask, what, wrong)
        if task.kind == "regression":
            outside = (numbers < task.range[0]) | (numbers > task.range[1])
            what = (
                f"lines have an outcome outside the plan's range, {task.range[0]:g} to {task.range[1]:g}, which is cut"
            )
            self._note("note", what, outside & mask)
            numbers = numbers.clip(*task.range)
            return numbers[:, None], np.zeros(self.table.count, int), TextColumn(("",), np.zeros(self.table.count, int))
        levels, known = columns[-1].levels(), own_labels(task.counted, self.source.label_map)
        # the names of censored cases and events are the same for all plans
        declared = known if task.kind == "survival" else ()
        self._leave_out(mask, RARE, columns[-1].isin(self._rare(columns[-1], mask, patients, declared)))
        numbered = np.array([known.get(level, -1) for level in levels], int)
        labels = numbered[columns[-1].codes] if len(numbered) else np.zeros(0, int)
        what = f"lines have a label that is not the plan's ({', '.join(task.counted)}); add it to data.label_map"
        self._note("stops", what, (labels < 0) & mask)
        labels = labels.clip(0)
        learned = [labels.astype(float)] if task.kind == "classification" else [numbers, labels.astype(float)]
        return np.stack(learned, 1), labels, TextColumn(levels, columns[-1].codes)

    def _rare(
        self, column: TextColumn, mask: np.ndarray, patients: TextColumn, declared: Collection[str]
    ) -> frozenset[str]:
        """Return those labels of a column that occur for too few patients."""
        if not self.source.leaves_out_rare:
            return frozenset()
        levels, pairs = column.levels(), np.unique(np.stack([column.codes, patients.codes])[:, mask], axis=1)
        who: dict[str, set[int]] = {level: set() for level in levels}
        for label, patient in pairs.T.tolist():
            who[levels[label]].add(patient)
        rare = self.source.rare({label: [*map(str, own)] for label, own in who.items()}, declared)
        return frozenset(text for text, label in zip(column.values, levels, strict=True) if label in rare)

    # -------------------------------------------------------------------------- the plan's inputs
    def _inputs(self, mask: np.ndarray) -> np.ndarray:
        """Return the inputs of all rows, [rows, inputs]; missing and invalid values are NaN."""
        inputs = np.full((self.table.count, self.task.read_numbers), np.nan)
        place, read = 0, {column.name for column in self.read}
        for column in self.task.columns:
            if column.name in read:
                inputs[:, place : place + column.inputs] = self._values(column, mask)
            place += column.inputs
        return inputs

    def _values(self, column: Column, mask: np.ndarray) -> np.ndarray:
        """Return the inputs that a column provides, for all rows, [rows, inputs]."""
        own = self._column(column.name)
        missing = self._lacks(column.name, own)
        self._note(
            "note", f"lines have no value of {column.name!r}; task.missing is {self.task.missing}", missing & mask
        )
        if column.levels:
            places = {level(name): place for place, name in enumerate(column.levels)}
            plans = {level(str(here)): str(plan) for here, plan in self.source.levels.get(column.name, {}).items()}
            numbered = [places.get(level(plans.get(name, name)), -1) for name in own.levels()]
            found = np.array(numbered, int)[own.codes] if numbered else np.zeros(0, int)
            odd, values = (found < 0) & ~missing, np.eye(len(places))[found.clip(0)]
            values[odd] = 0.0
            values[missing] = np.nan
            what = (
                f"lines have a level of {column.name!r} that the plan does not know; they count as none of its levels"
            )
        else:
            numbers = self._numbers(column.name, own)
            below = (numbers < 0) & ~missing & mask
            if {f"{code:g}" for code in np.unique(numbers[below]).tolist()} in CODES:
                self._note("note", CODE.format(column.name), below)
            odd = ~((numbers >= column.low) & (numbers <= column.high)) & ~missing
            values = np.where(odd | missing, np.nan, numbers)[:, None]
            bounds = (column.low, column.high)
            within = "" if bounds == (-LARGEST, LARGEST) else f" from {column.low:g} to {column.high:g}"
            what = f"lines have a value of {column.name!r} that is not a number{within}, and counts as missing"
        self._note("note", f"{what}; correct it, or name it under data.missing", odd & mask)
        if (odd & mask).any():
            self.odd[what] = odd & mask
        return values

    def _numbers(self, name: str, column: TextColumn) -> np.ndarray:
        """Convert a column to numbers, [rows], without points between thousands."""
        texts = tuple(without_thousands(name, column.values, self.source.decimal))
        return TextColumn(texts, column.codes).numbers(self.source.decimal)

    # ------------------------------------------------------------------ notes
    def _note(self, severity: str, subject: str, lines: np.ndarray) -> None:
        places = np.flatnonzero(lines)
        if len(places):
            self.problems.append(Problem(severity, subject, len(places), self.table.lines_called(places)))  # type: ignore[arg-type]

    def _tell_table(self) -> None:
        """Record as problems the rows that can't be read, and an old encoding whose letters may be decoded wrongly."""
        table = self.table
        if table.uneven:
            what = "lines have more or fewer cells than the first; export the table again"
            self.problems.append(Problem("left out", what, table.uneven, table.uneven_lines()))
        if table.coding == WINDOWS:
            self.problems.append(Problem("note", OLD_LETTERS, table.count))


def read_rows(task: PatientTable, path: Path, source: DataSource, outcome: bool = True) -> TableRows:
    """Read the cases in a table. With `outcome`, rows without an outcome are left out."""
    return _Reading(task, path, source, outcome).rows()
