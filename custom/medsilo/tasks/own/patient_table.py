"""A hospital's own table: a line per case, CSV or Parquet."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.models.architectures import Linear
from medsilo.models.network import Network
from medsilo.tasks.case_index import (
    OTHER_NAMES,
    CaseIndex,
    Entry,
    check_parts,
    tell_sheet,
    without_who_left,
)
from medsilo.tasks.classification import Classification
from medsilo.tasks.inference import Inference
from medsilo.tasks.objective import Objective
from medsilo.tasks.own.own_data import dealt, divided
from medsilo.tasks.own.own_numbers import (
    LARGEST,
    MOST_COLUMNS,
    Column,
    Scales,
    Standardised,
    Text,
    from_training_cases,
    own_labels,
    scaled,
)
from medsilo.tasks.regression import Regression
from medsilo.tasks.site_data import Cases, SiteData, patients_of
from medsilo.tasks.sources import PARTS, DataSource
from medsilo.tasks.survey import PartFacts, Problem, Survey, digest, repeated
from medsilo.tasks.survival import EVENTS, Survival, incomparable
from medsilo.tasks.table_reader import TableReader, as_written

MOST_INPUTS = 20_000
TWICE = "lines of one patient are there twice, alike in all that is read; remove the copies"
ALONE = (
    "every line counts as a patient of its own; if a patient has several, say which column names the patient "
    "(data.columns.patient)"
)


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
    def _finished(self, data: SiteData) -> SiteData:
        """Return the cases as a network reads them; the survey keeps what numbers were standardised with."""
        parts: dict[str, Cases] = {part: getattr(data, part) for part in PARTS}
        known = parts["train"] if len(parts["train"]) else parts["test"]  # a site that does not train has only these
        scales = self.scales_of(known.inputs)
        read = [(self.finished(own.inputs, scales), own.targets, own.patients) for own in parts.values()]
        told = {name: (float(a), float(b)) for name, a, b in zip(self.input_names, *scales, strict=False)}
        survey = data.survey and replace(data.survey, scales=told)
        return replace(SiteData.in_memory(read), survey=survey)

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

    def own_scales(self, source: DataSource) -> Scales:
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

    def rows(self, path: Path, source: DataSource, outcome: bool = True) -> "TableRows":
        """Return the cases of a table as numbers, and what is wrong with others.

        outcome: whether it is read, too; without it, no line is left out for the lack of one.
        """
        return TableRows(self, path, source, outcome)

    def _examined(self, site: str, sites: Sequence[str], source: DataSource | None) -> tuple[Survey, dict[str, Cases]]:
        """Return what there is in a site's table, read once, and the parts, not standardised yet."""
        self.check_source(source)
        assert source is not None
        if source.images or source.labels or source.patient or source.cache_folder:
            raise DataError(
                "data: a table has no images, labels, patient pattern or cache on the disk; leave these keys out, and "
                "name columns under data.columns"
            )
        path = source.table_file(self._folder(site, source))
        found = self.rows(path, source)
        listing = found.listing
        without_who_left(listing, source)
        if self.partition is not None:
            listing.entries = dealt(self.partition, site, sites, listing.entries, found.classes)
        check_parts(listing)
        listing.check_patients(source)
        parts = divided(listing, source, self.shares, self.split)
        cases = {part: found.cases(parts[part]) for part in PARTS}
        return self._survey_of(listing, cases, source), cases

    def _survey_of(self, listing: CaseIndex, cases: Mapping[str, Cases], source: DataSource) -> Survey:
        shown = {part: self._part(own) for part, own in cases.items()}
        self._note_empty_parts(listing, shown, source)
        if self.kind == "survival":
            scored = [part for part in self._needed(source) if part != "train"]
            listing.problems += incomparable({part: cases[part].targets for part in scored})
        copies = repeated(
            patient + digest(torch.cat([inputs, target.reshape(-1).double()]))
            for own in cases.values()
            for patient, inputs, target in zip(own.patients, own.inputs, own.targets, strict=True)
        )
        if copies:
            listing.problems.append(Problem("note", TWICE, copies))
        return self._survey(listing, shown, source)

    def _part(self, data: Cases) -> PartFacts:
        counts: dict[str, int] = {}
        if self.kind != "regression":
            labels = data.targets[:, 1] if self.kind == "survival" else data.targets
            known = torch.bincount(labels.long(), minlength=len(self.counted)).tolist()
            counts = dict(zip(self.counted, known, strict=True))
        return PartFacts(len(data), len(set(patients_of(data))), counts)


class TableRows:
    """The cases of a table: what each line is, its inputs as they stand there, its outcome."""

    def __init__(self, task: PatientTable, path: Path, source: DataSource, outcome: bool) -> None:
        self.task, self.source, self.outcome = task, source, outcome
        self.listing = CaseIndex()
        self.inputs: dict[str, list[float]] = {}  # by the line's place
        self.outcomes: dict[str, tuple[float, ...]] = {}
        self.classes: dict[str, int] = {}  # of a classification, or whether there was an event
        self.missing = frozenset(source.missing)
        self.levels = {
            name: {TableReader.level(own): str(plan) for own, plan in kinds.items()}
            for name, kinds in source.levels.items()
        }
        self.labels = own_labels(task.counted, source.label_map)
        self.known = ", ".join(task.counted)
        self.wrong: defaultdict[tuple[str, str], list[str]] = defaultdict(list)  # (severity, what) -> lines
        self._read(path)

    def _read(self, path: Path) -> None:
        task, source = self.task, self.source
        absent = task.absent(source)
        read = [one.name for one in task.columns if one.name not in absent]
        columns = [*read, *(task._outcomes if self.outcome else ())]
        self.roles = {role: source.column(role) for role in ("patient", "part", "site")}
        called = source.own_names(columns, self.roles, "columns", (*task._outcomes, *absent))
        needed = {own: name for name, own in called.items()}
        if "patient" in source.columns:
            needed[self.roles["patient"]] = "patient"
        sheet = TableReader().read(path, needed, tuple(self.roles.values()))
        self.names_patients = self.roles["patient"] in sheet.columns
        for place, cells in sheet.lines:
            self._take(place, dict(zip(sheet.columns, cells, strict=True)), called)
        self._tell(sheet)

    @property
    def as_read(self) -> Tensor:
        """The inputs of all cases, in the table's order."""
        return self._inputs(list(self.inputs))

    def _inputs(self, names: Sequence[str]) -> Tensor:
        found = [self.inputs[name] for name in names]
        return torch.tensor(found, dtype=torch.float64).reshape(len(names), self.task.read_numbers)

    def cases(self, entries: Sequence[Entry]) -> Cases:
        """Return these cases as tensors, not standardised yet."""
        kind = self.task.kind
        names = [entry.name for entry in entries]
        inputs = self._inputs(names)
        outcomes = torch.tensor([self.outcomes[name] for name in names], dtype=torch.float64)
        if kind == "survival":
            targets = outcomes.reshape(len(names), 2).float()
        else:
            targets = outcomes.reshape(len(names)).to(torch.long if kind == "classification" else torch.float32)
        return Cases(inputs, targets, [entry.patient for entry in entries])

    def _take(self, place: str, cells: Mapping[str, str], called: Mapping[str, str]) -> None:
        """Read one line, or note why it can't be."""
        task, (of_patient, of_part, of_site) = self.task, self.roles.values()
        patient = cells.get(of_patient) or ("" if of_patient in cells else _name_of(cells))
        if not patient or patient in self.missing:
            return self._note("left out", "lines have no patient; fill in the column", place)
        inputs: list[float] = []
        for column in task.columns:
            if column.name not in called:
                inputs += [math.nan] * column.inputs
                continue
            text = cells[called[column.name]]
            if text in self.missing:
                inputs += [math.nan] * column.inputs
                what = f"lines have no value of {column.name!r}"
                if task.missing == "leave-out":
                    return self._note("left out", f"{what}; fill it in, or agree on task.missing=mean", place)
                self._note("note", f"{what}; task.missing is {task.missing}", place)
                continue
            if not column.levels:
                text = as_written(text, self.source.decimal)
            values = column.read(text, self.levels.get(column.name, {}))
            if values is None:
                return self._refuse(column, place)
            inputs += values
        if self.outcome:
            texts = [cells[called[name]] for name in task._outcomes]
            if (outcome := self._outcome(texts, place)) is None:
                return None
            self.outcomes[place] = outcome
            self.classes[place] = int(outcome[-1]) if task.kind != "regression" else 0
        self.inputs[place] = inputs
        label = str(self.classes[place]) if self.outcome and task.kind != "regression" else ""
        part = cells.get(of_part, "").lower()
        entry = Entry(place, (), label, patient, OTHER_NAMES.get(part, part), cells.get(of_site, ""))
        self.listing.entries.append(entry)
        return None

    def _refuse(self, column: Column, place: str) -> None:
        """Note a value that its column can't have."""
        if column.levels:
            what = f"lines have a level of {column.name!r} that the plan does not know; add it to data.levels"
            self._note("stops", what, place)
        else:
            bounds = (
                "" if (column.low, column.high) == (-LARGEST, LARGEST) else f" from {column.low:g} to {column.high:g}"
            )
            what = f"lines have a value of {column.name!r} that is not a number{bounds}; correct it"
            self._note("left out", f"{what}, or name it under data.missing", place)

    def _outcome(self, texts: Sequence[str], place: str) -> tuple[float, ...] | None:
        """Return what is learned of a line; None where it has none, which is noted."""
        task = self.task
        if any(text in self.missing for text in texts):
            self._note("left out", "lines have no outcome", place)
            return None
        if task.kind != "regression":
            label = self.labels.get(TableReader.level(texts[-1]))
            if label is None:
                what = f"lines have a label that is not the plan's ({self.known}); add it to data.label_map"
                self._note("stops", what, place)
                return None
            if task.kind == "classification":
                return (float(label),)
        number = TableReader.number(texts[0], self.source.decimal)
        low, high = (0.0, LARGEST) if task.kind == "survival" else task.range
        if number is None or not low <= number <= high:
            self._note(
                "left out", f"lines have an outcome that is not a number from {low:g} to {high:g}; correct it", place
            )
            return None
        return (number,) if task.kind == "regression" else (number, float(label or 0))

    def _note(self, severity: str, what: str, place: str) -> None:
        self.wrong[severity, what].append(place)

    def _tell(self, sheet: TableReader) -> None:
        """Put what was found into the listing."""
        for (severity, what), places in self.wrong.items():
            self.listing.add(severity, what, places)
        tell_sheet(self.listing, sheet)
        if self.listing.entries and not self.names_patients:
            self.listing.patients_named = False
            self.listing.problems.append(Problem("note", ALONE, len(self.listing.entries)))


def _name_of(cells: Mapping[str, str]) -> str:
    """Return what stands for a line that names no patient: the same wherever the line stands."""
    return hashlib.sha256("\x1f".join(cells.values()).encode()).hexdigest()[:32]
