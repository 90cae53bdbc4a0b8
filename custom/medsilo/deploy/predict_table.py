"""Predict the cases of a table: a line of predictions.csv for each."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import is_safe_name, make_folder, write_json, write_text
from medsilo.deploy.predict import Say
from medsilo.deploy.source import Source
from medsilo.runs import paths
from medsilo.tasks.own.patient_table import PatientTable, Scales, TableRows
from medsilo.tasks.sources import DataSource

AT_ONCE = 4096  # cases that go through the network together
COLUMNS = ("table", "line", "patient", "error")  # whatever was found
NEEDS = (
    "the plan standardises numbers by each hospital's own mean and deviation (task.standardise=site); give "
    "--site-config with the medsilo.yaml of the hospital whose patients these are, or --site with its name, where its "
    "part of the run is on this machine"
)


def predict_tables(
    source: Source,
    tables: Sequence[Path],
    out: Path,
    device: torch.device,
    say: Say,
    data: DataSource | None,
    own: Path,
) -> int:
    """Predict every line of these tables into `out`; returns how many failed.

    data: the hospital's own description of its data, by which its columns and levels are read, and whose table says
    how its numbers are standardised, unless `own`, the hospital's part of a run, has that from training.
    """
    task = source.plan.task
    assert isinstance(task, PatientTable)
    if any(path.resolve().parent == out.resolve() for path in tables):
        raise MedsiloError("the tables lie in the output folder; give -o another one, so that none is written over")
    scales = _scales(task, data, own)
    source.network.to(device)
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for path in tables:
        described = data or DataSource(folder=path.parent)
        found = list(_predicted(source, task, path, described, scales, device))
        failed = sum(row["error"] is not None for row in found)
        say(f"{len(found)} cases" + (f", {failed} of them failed" if failed else ""))
        rows += found
    _write(out, source.facts, rows)
    return sum(row["error"] is not None for row in rows)


def _scales(task: PatientTable, data: DataSource | None, own: Path) -> Scales:
    """Return how the hospital's numbers are standardised: as in training, or else by all cases of its table."""
    if (own / paths.DATA).is_file():
        try:
            told = json.loads((own / paths.DATA).read_text("utf-8"))["scales"]
            return task.scales_that_were(told)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MedsiloError(f"the site's {paths.DATA} can't be read; repeat the run", str(error)) from error
    if not task.needs_scales:
        return task.scales_of(torch.zeros(0, task.read_numbers, dtype=torch.float64))
    if data is None:
        raise MedsiloError(NEEDS)
    return task.scales_of(task.rows(task.file(data, data.folder), data, outcome=False).as_read)


@torch.inference_mode()
def _predicted(
    source: Source, task: PatientTable, path: Path, data: DataSource, scales: Scales, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of a table, in its order; a line that can't be read has its reason."""
    try:
        rows = task.rows(path, data, outcome=False)
    except DataError as error:
        yield {"table": path.name, "line": None, "patient": None, "error": str(error), "detail": error.private}
        return
    found: dict[str, dict[str, Any]] = {place: {"error": what} for place, what in _wrong(rows).items()}
    places = list(rows.inputs)
    inputs = task.finished(rows.as_read, scales)
    for first in range(0, len(places), AT_ONCE):
        output, experts, sure = source.answer(inputs[first : first + AT_ONCE].to(device))
        if not output.isfinite().all():
            raise MedsiloError("the network's output is NaN or infinite; check the table's numbers")
        answers = task.answers(output.cpu())
        for number, (place, answer) in enumerate(zip(places[first : first + AT_ONCE], answers, strict=True)):
            chosen = {} if sure is None else {"expert": experts[number], "confidence": float(sure[number])}
            found[place] = {"error": None, **answer, **chosen}
    patients = {entry.name: entry.patient for entry in rows.listing.entries if rows.names_patients}
    for place in sorted(found, key=_number):
        yield {"table": path.name, "line": _number(place), "patient": patients.get(place), **found[place]}


def _wrong(rows: TableRows) -> dict[str, str]:
    """Return why each line could not be read, by its place."""
    refused = [problem for problem in rows.listing.problems if problem.severity != "note"]
    return {place: problem.what for problem in refused for place in problem.private}


def _number(place: str) -> int:
    return int(place.rpartition(" ")[2])


def site_part(run: Path, site: str) -> Path:
    """Return a hospital's part of a run; the run itself where no hospital is named."""
    return run / paths.SITES / site if is_safe_name(site) else run


def _write(out: Path, model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write predictions.json and predictions.csv."""
    write_json(out / "predictions.json", {"model": model, "cases": list(rows)})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys([*COLUMNS, *(key for row in rows for key in row)])), restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "predictions.csv", text.getvalue())
