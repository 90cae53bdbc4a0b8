"""The lines of a hospital's own table, CSV or Parquet, as cases. Only a site imports this."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.tasks.case_index import OTHER_NAMES, CaseIndex, Entry, check_parts, tell_sheet, without_who_left
from medsilo.tasks.cells import as_written, without_thousands
from medsilo.tasks.own.own_numbers import LARGEST, Column, own_labels
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.own.reading import dealt, divided, folder_of, needed, note_empty_parts, told_in
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import Cases, SiteData, patients_of
from medsilo.tasks.sources import DataSource
from medsilo.tasks.survey import PartFacts, Problem, Survey, digest, repeated
from medsilo.tasks.survival import concordant_pairs
from medsilo.tasks.table_reader import TableReader

TOTALS = frozenset(("total", "sum", "mean", "summe", "gesamt", "mittelwert", "somme", "moyenne", "suma", "totale"))
TWICE = "lines of one patient are there twice, alike in all that is read; remove the copies"
ALIKE = "lines are alike in every column and count as one patient; name the patient, or remove what is a copy"
CODE = "lines have the same negative number of {!r}, as registries write 'not known'; if so, add it to data.missing"
ALONE = (
    "every line counts as a patient of its own; if a patient has several, say which column names the patient "
    "(data.columns.patient)"
)


def finished(task: PatientTable, data: SiteData) -> SiteData:
    """Return the cases as a network reads them; the survey keeps what numbers were standardised with."""
    parts: dict[str, Cases] = {part: getattr(data, part) for part in PARTS}
    known = parts["train"] if len(parts["train"]) else parts["test"]  # a site that does not train has only these
    scales = task.scales_of(known.inputs)
    read = [(task.finished(own.inputs, scales), own.targets, own.patients) for own in parts.values()]
    told = {name: (float(a), float(b)) for name, a, b in zip(task.input_names, *scales, strict=False)}
    survey = data.survey and replace(data.survey, scales=told)
    return replace(SiteData.in_memory(read), survey=survey)


def examined(
    task: PatientTable, site: str, sites: Sequence[str], source: DataSource | None
) -> tuple[Survey, dict[str, Cases]]:
    """Return what there is in a site's table, read once, and the parts, not standardised yet."""
    task.check_source(source)
    assert source is not None
    if source.images or source.labels or source.patient or source.cache_folder:
        raise DataError(
            "data: a table has no images, labels, patient pattern or cache on the disk; leave these keys out, and "
            "name columns under data.columns"
        )
    path = source.table_file(folder_of(task, site, source))
    found = task.rows(path, source)
    listing = found.listing
    without_who_left(listing, source)
    if task.partition is not None:
        listing.entries = dealt(task.partition, site, sites, listing.entries, found.classes)
    check_parts(listing)
    listing.check_patients(source)
    parts = divided(listing, source, task.shares, task.split)
    cases = {part: found.cases(parts[part]) for part in PARTS}
    return survey_of(task, listing, cases, source), cases


def survey_of(task: PatientTable, listing: CaseIndex, cases: Mapping[str, Cases], source: DataSource) -> Survey:
    """Return what there is to tell of a table's cases."""
    shown = {part: part_of(task, own) for part, own in cases.items()}
    note_empty_parts(task, listing, shown, source)
    if task.kind == "survival":
        scored = [part for part in needed(source) if part != "train"]
        listing.problems += incomparable({part: cases[part].targets for part in scored})
    copies = repeated(
        patient + digest(torch.cat([inputs, target.reshape(-1).double()]))
        for own in cases.values()
        for patient, inputs, target in zip(own.patients, own.inputs, own.targets, strict=True)
    )
    if copies:
        listing.problems.append(Problem("note", TWICE if listing.patients_named else ALIKE, copies))
    return told_in(task, listing, shown, source)


def part_of(task: PatientTable, data: Cases) -> PartFacts:
    """Return what there is to tell of one part."""
    counts: dict[str, int] = {}
    if task.kind != "regression":
        labels = data.targets[:, 1] if task.kind == "survival" else data.targets
        known = torch.bincount(labels.long(), minlength=len(task.counted)).tolist()
        counts = dict(zip(task.counted, known, strict=True))
    return PartFacts(len(data), len(set(patients_of(data))), counts)


def incomparable(targets: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield a problem for each part that has cases, but no two that can be compared."""
    for part, target in targets.items():
        if len(target) and not concordant_pairs(torch.zeros(len(target)), target)[1].sum():
            what = f"the {part} part has no two cases to compare, an event and a longer time; bring more cases"
            yield Problem("stops", what)


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
        sheet = TableReader(named_by=self.roles["patient"]).read(path, needed, tuple(self.roles.values()))
        numbers = [one.name for one in task.columns if not one.levels and one.name in called]
        if self.outcome and task.kind != "classification":
            numbers.append(task._outcomes[0])
        for name in numbers:
            own = sheet.columns[called[name]]
            texts = without_thousands(name, [cells[own] for _, cells in sheet.lines], source.decimal)
            for (_, cells), text in zip(sheet.lines, texts, strict=True):
                cells[own] = text
            below = {place: text for (place, _), text in zip(sheet.lines, texts, strict=True) if text.startswith("-")}
            if {*map(TableReader.level, below.values())} - self.missing in ({"-9"}, {"-99"}, {"-999"}):
                self.wrong["note", CODE.format(name)] = [place for place in below if below[place] not in self.missing]
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
        patient = cells[of_patient]
        if not patient or patient in self.missing or patient.casefold() in TOTALS:
            return self._note("left out", "lines have no patient, or are totals; fill it in, or remove them", place)
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
            if all(map(math.isnan, inputs)):
                return self._note("left out", "lines have no value in any column that is read; fill them in", place)
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
        if self.listing.entries and sheet.nameless:
            self.listing.patients_named = False
            self.listing.problems.append(Problem("note", ALONE, len(self.listing.entries)))
