"""Predict the lines of tables: a line of predictions.csv for each."""

from collections.abc import Iterator
from pathlib import Path

import torch

from medsilo.core.errors import DataError
from medsilo.tasks.own.own_numbers import Scales
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.sources import DataSource
from medsilo_lab.deploy.predictor import Predictor, Row, failures

COLUMNS = ("table", "line", "patient", "error")


class TablePredictor(Predictor):
    """Predicts every line of tables.

    The hospital's own table says how its numbers are standardised, unless its part of a run has that from training.
    """

    cases = "lines"

    def predict(self) -> int:
        task = self.source.plan.task
        assert isinstance(task, PatientTable)
        nobody = torch.zeros(0, task.read_numbers, dtype=torch.float64)
        scales = self.scales(lambda: task.scales_of(nobody))
        return failures(self.predict_rows(self.given, lambda path: _predicted(self, task, path, scales), COLUMNS))


def _predicted(asked: Predictor, task: PatientTable, path: Path, scales: Scales) -> Iterator[Row]:
    """Yield a row for each line of a table, in its order; a line that can't be read has its reason."""
    try:
        rows = task.rows(path, asked.data or DataSource(folder=path.parent), outcome=False)
    except DataError as error:
        yield {"table": path.name, "line": None, "patient": None, "error": str(error), "detail": error.private}
        return
    refused = [problem for problem in rows.listing.problems if problem.severity != "note"]
    found: dict[str, Row] = {place: {"error": problem.what} for problem in refused for place in problem.private}
    inputs = task.finished(rows.as_read, scales)
    found |= dict(zip(rows.inputs, asked.answers(inputs, task.target), strict=True))
    patients = {entry.name: entry.patient for entry in rows.listing.entries if rows.listing.patients_named}
    for place in sorted(found, key=_number):
        yield {"table": path.name, "line": _number(place), "patient": patients.get(place), **found[place]}


def _number(place: str) -> int:
    return int(place.rpartition(" ")[2])
