"""Predict the cases of a table."""

from collections.abc import Iterator
from pathlib import Path

import torch

from medsilo.core.errors import DataError
from medsilo.deploy.predicted_rows import Row, answered, failures, predict_rows, scales_for
from medsilo.deploy.predictor import PredictionRequest, Predictor
from medsilo.deploy.source import Source
from medsilo.tasks.own.patient_table import PatientTable, TableRows
from medsilo.tasks.own.standardising import Scales
from medsilo.tasks.sources import DataSource

COLUMNS = ("table", "line", "patient", "error")


def predict_tables(asked: PredictionRequest) -> int:
    """Predict every line of these tables; returns how many failed.

    The hospital's own table says how its numbers are standardised, unless its part of a run has that from training.
    """
    task = asked.source.plan.task
    assert isinstance(task, PatientTable)
    nobody = torch.zeros(0, task.read_numbers, dtype=torch.float64)
    scales = scales_for(task, asked.data, asked.own, lambda: task.scales_of(nobody))

    def predicted(path: Path) -> Iterator[Row]:
        data = asked.data or DataSource(folder=path.parent)
        return _predicted(asked.source, task, path, data, scales, asked.device)

    return failures(predict_rows(asked, asked.given, predicted, COLUMNS))


PREDICTOR = Predictor("lines", predict_tables)


def _predicted(
    source: Source, task: PatientTable, path: Path, data: DataSource, scales: Scales, device: torch.device
) -> Iterator[Row]:
    """Yield a row for each line of a table, in its order; a line that can't be read has its reason."""
    try:
        rows = task.rows(path, data, outcome=False)
    except DataError as error:
        yield {"table": path.name, "line": None, "patient": None, "error": str(error), "detail": error.private}
        return
    found: dict[str, Row] = {place: {"error": what} for place, what in _wrong(rows).items()}
    inputs = task.finished(rows.as_read, scales)
    found |= dict(zip(rows.inputs, answered(source, task.target, inputs, device), strict=True))
    patients = {entry.name: entry.patient for entry in rows.listing.entries if rows.names_patients}
    for place in sorted(found, key=_number):
        yield {"table": path.name, "line": _number(place), "patient": patients.get(place), **found[place]}


def _wrong(rows: TableRows) -> dict[str, str]:
    """Return why each line could not be read, by its place."""
    refused = [problem for problem in rows.listing.problems if problem.severity != "note"]
    return {place: problem.what for problem in refused for place in problem.private}


def _number(place: str) -> int:
    return int(place.rpartition(" ")[2])
