"""A site's scores on its test cases: what is kept of every case in its folder."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import torch

from medsilo.core.files import write_text
from medsilo.runs.paths import CASES
from medsilo.tasks.metrics import Measures

CASE, PATIENT = "case", "patient"


def write_measures(folder: Path, measures: Measures, patients: Sequence[str]) -> None:
    """One line per test case, with numbers for names: the case's, and its patient's in order of appearance."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([CASE, PATIENT, *measures])
    columns = [values.tolist() for values in measures.values()]
    for case, (patient, *row) in enumerate(zip(patients, *columns, strict=True)):
        writer.writerow([case, numbers[patient], *("" if value != value else value for value in row)])
    write_text(folder / CASES, text.getvalue())


def read_measures(folder: Path) -> tuple[Measures, list[int]]:
    """Return what `write_measures` wrote, and the patient's number of every case."""
    with (folder / CASES).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in (CASE, PATIENT)]
    measures = {name: torch.tensor([float(row[name] or "nan") for row in rows], dtype=torch.float64) for name in names}
    return measures, [int(row[PATIENT]) for row in rows]
