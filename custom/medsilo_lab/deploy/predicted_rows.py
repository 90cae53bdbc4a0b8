"""Predict the lines of tables. The file predictions.csv gets a row for each line of a table."""

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

    The values of the table are standardised with the means and deviations from training. If this machine lacks the
    means and deviations from training, the means and deviations of the table are used.
    """

    cases = "lines"

    def predict(self) -> int:
        task = self.source.plan.task
        assert isinstance(task, PatientTable)
        nobody = torch.zeros(0, task.read_numbers, dtype=torch.float64)
        scales = self.scales(lambda: task.scales_of(nobody))
        return failures(self.predict_rows(self.given, lambda path: _predicted(self, task, path, scales), COLUMNS))


def _predicted(predictor: Predictor, task: PatientTable, path: Path, scales: Scales) -> Iterator[Row]:
    """Yield a row for each line of a table, in the order of the lines. If a line cannot be read, the row contains the
    reason.
    """
    try:
        rows = task.rows(path, predictor.data or DataSource(folder=path.parent), outcome=False)
    except DataError as error:
        yield {"table": path.name, "line": None, "patient": None, "error": str(error), "detail": error.private}
        return
    refused = [problem for problem in rows.problems if problem.severity != "note"]
    found: dict[str, Row] = {place: {"error": problem.what} for problem in refused for place in problem.private}
    inputs = task.finished(torch.from_numpy(rows.inputs), scales)
    found |= dict(zip(rows.places, predictor.answers(inputs, task.target), strict=True))
    for what, lines in rows.odd.items():  # a row for an invalid line contains a reason and no prediction
        found |= {place: {"error": what} for place in rows.table.lines_called(lines.nonzero()[0])}
    patients = dict(zip(rows.places, rows.patients.texts(), strict=True)) if rows.patients_named else {}
    for place in sorted(found, key=_number):
        yield {"table": path.name, "line": _number(place), "patient": patients.get(place), **found[place]}


def _number(where: str) -> int:
    return int(where.rpartition(" ")[2])
