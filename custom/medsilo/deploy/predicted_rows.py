"""Predict what is in rows, a table's lines or a recording's windows: a line of predictions.csv for each."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import make_folder, write_json, write_text
from medsilo.deploy.predictor import PredictionRequest, Predictor
from medsilo.deploy.watch import SEEN, Seen, mean_of
from medsilo.runs import paths
from medsilo.tasks.own.columns import Scales
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.sources import DataSource

AT_ONCE = 4096  # cases that go through the network together
NEEDS = (
    "the plan standardises numbers by each hospital's own mean and deviation (task.standardise=site); give "
    "--settings with the medsilo.yaml of the hospital whose patients these are, or --site with its name, where its "
    "part of the run is on this machine"
)
Row = dict[str, Any]


def scales_for(asked: PredictionRequest, plain: Callable[[], Scales]) -> Scales:
    """Return how a hospital's numbers are standardised: as in training, or else by all that its own data hold.

    plain: what is taken where no hospital's numbers matter.
    """
    task: Any = asked.source.plan.task
    if (asked.own / paths.DATA).is_file():
        try:
            return task.scales_that_were(json.loads((asked.own / paths.DATA).read_text("utf-8"))["scales"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MedsiloError(f"the site's {paths.DATA} can't be read; repeat the run", str(error)) from error
    if not task.needs_scales:
        return plain()
    if asked.data is None:
        raise MedsiloError(NEEDS)
    return task.own_scales(asked.data)


@torch.inference_mode()
def answered(asked: PredictionRequest, target: str, inputs: Tensor) -> Iterator[Row]:
    """Yield what the model says of each case. target: the name of a number that it learned."""
    source = asked.source
    for cases in inputs.split(AT_ONCE):
        output, experts, sure = source.answer(cases.to(asked.device))
        if not output.isfinite().all():
            raise MedsiloError("the network's output is NaN or infinite; check the numbers that it reads")
        said = source.said(output.cpu(), cases)
        seen = source.watch.measure(cases, output.cpu(), said) if source.watch else []
        for place, answer in enumerate(source.plan.task.goal.answers(output.cpu(), target)):
            chosen = {} if sure is None else {"expert": experts[place], "confidence": float(sure[place])}
            watched = {SEEN: seen[place]} if seen else {}
            yield {"error": None, **answer, **said[place], **chosen, **watched}


def predict_rows(
    asked: PredictionRequest, files: Sequence[Path], predicted: Callable[[Path], Iterator[Row]], columns: Sequence[str]
) -> list[Row]:
    """Write predictions.json and predictions.csv with the rows of all files, and return them.

    columns: those that predictions.csv has whatever was found.
    """
    source, out = asked.source, asked.out
    if any(path.resolve().parent == out.resolve() for path in files):
        raise MedsiloError("the files lie in the output folder; give -o another one, so that none is written over")
    source.network.to(asked.device)
    make_folder(out)
    rows: list[Row] = []
    for path in files:
        found = list(predicted(path))
        failed = failures(found)
        asked.say(f"{len(found)} cases" + (f", {failed} of them failed" if failed else ""))
        rows += found
    if source.watch:
        source.watch.keep(_by_patient(rows))
    write_json(out / "predictions.json", {"model": source.facts, "cases": rows})
    write_rows(out / "predictions.csv", rows, columns)
    return rows


def _by_patient(rows: Sequence[Row]) -> list[Seen]:
    """Take what was seen out of the rows, and return it for each patient, recording or row, in order."""
    whose: dict[tuple[Any, Any, Any], list[Seen]] = {}
    for place, row in enumerate(rows):
        if seen := row.pop(SEEN, None):
            patient, recording = row.get("patient"), row.get("recording")
            alone = place if patient is None and recording is None else None
            whose.setdefault((patient, recording if patient is None else None, alone), []).append(seen)
    return [mean_of(cases) for cases in whose.values()]


def failures(rows: Sequence[Row]) -> int:
    """Return how many rows have no answer."""
    return sum(row["error"] is not None for row in rows)


def write_rows(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Write rows as CSV, under these columns and all others that any of them has."""
    text, every = io.StringIO(), dict.fromkeys([*columns, *(key for row in rows for key in row)])
    writer = csv.DictWriter(text, list(every), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


COLUMNS = ("table", "line", "patient", "error")


def predict_tables(asked: PredictionRequest) -> int:
    """Predict every line of these tables; returns how many failed.

    The hospital's own table says how its numbers are standardised, unless its part of a run has that from training.
    """
    task = asked.source.plan.task
    assert isinstance(task, PatientTable)
    nobody = torch.zeros(0, task.read_numbers, dtype=torch.float64)
    scales = scales_for(asked, lambda: task.scales_of(nobody))
    return failures(predict_rows(asked, asked.given, lambda path: _predicted(asked, task, path, scales), COLUMNS))


PREDICTOR = Predictor("lines", predict_tables)


def _predicted(asked: PredictionRequest, task: PatientTable, path: Path, scales: Scales) -> Iterator[Row]:
    """Yield a row for each line of a table, in its order; a line that can't be read has its reason."""
    try:
        rows = task.rows(path, asked.data or DataSource(folder=path.parent), outcome=False)
    except DataError as error:
        yield {"table": path.name, "line": None, "patient": None, "error": str(error), "detail": error.private}
        return
    refused = [problem for problem in rows.listing.problems if problem.severity != "note"]
    found: dict[str, Row] = {place: {"error": problem.what} for problem in refused for place in problem.private}
    inputs = task.finished(rows.as_read, scales)
    found |= dict(zip(rows.inputs, answered(asked, task.target, inputs), strict=True))
    patients = {entry.name: entry.patient for entry in rows.listing.entries if rows.names_patients}
    for place in sorted(found, key=_number):
        yield {"table": path.name, "line": _number(place), "patient": patients.get(place), **found[place]}


def _number(place: str) -> int:
    return int(place.rpartition(" ")[2])
