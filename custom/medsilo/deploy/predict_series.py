"""Predict the windows of recordings, and of each recording the mean of what its windows say."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from medsilo.core.errors import DataError, MedsiloError
from medsilo.deploy.predicted_rows import Row, answered, failures, predict_rows, scales_for, write_rows
from medsilo.deploy.predictor import PredictionRequest, Predictor
from medsilo.deploy.source import Source
from medsilo.tasks.listing import files_below
from medsilo.tasks.own.recordings import KINDS
from medsilo.tasks.own.series_folder import SeriesFolder
from medsilo.tasks.own.standardising import Scales
from medsilo.tasks.sources import DataSource

RECORDINGS = "recordings.csv"
COLUMNS = ("recording", "patient", "window", "row", "seconds", "error")


def predict_series(asked: PredictionRequest) -> int:
    """Predict every window of these recordings, files or folders with such; returns how many files failed.

    The hospital's own recordings say how numbers are standardised, unless its part of a run has that from training.
    """
    task = asked.source.plan.task
    assert isinstance(task, SeriesFolder)
    files = [file for path in asked.given for file in (_below(path) if path.is_dir() else [path])]
    if not files:
        raise MedsiloError(f"there are no recordings; give files ({', '.join(KINDS)}), or folders with such")
    scales = scales_for(task, asked.data, asked.own, lambda: task.scales_of([]))

    def predicted(path: Path) -> Iterator[Row]:
        data = asked.data or DataSource(folder=path.parent)
        return _predicted(asked.source, task, path, data, scales, asked.device)

    rows = predict_rows(asked, files, predicted, COLUMNS)
    write_rows(asked.out / RECORDINGS, list(_means(rows, task)), ("recording", "patient"))
    return failures(rows)


PREDICTOR = Predictor("recordings", predict_series)


def _below(folder: Path) -> list[Path]:
    return [path for name, path in files_below(folder)[0].items() if name.lower().endswith(KINDS)]


def _predicted(
    source: Source, task: SeriesFolder, path: Path, data: DataSource, scales: Scales, device: torch.device
) -> Iterator[Row]:
    """Yield a row for each window of a recording, in time; a recording that can't be read has its reason."""
    none: Row = {**dict.fromkeys(COLUMNS), "recording": path.name}
    try:
        found = list(task.windows(path, task.reader(data, outcome=False)))
        if not any(len(windows.inputs) for _, _, windows in found):
            raise DataError(f"a recording has no window of {task.window} steps in a row that are whole")
    except DataError as error:
        yield {**none, "error": str(error), "detail": error.private}
        return
    for patient, recording, windows in found:
        seconds = recording.seconds
        answers = answered(source, task, task.finished(torch.from_numpy(windows.inputs), scales), device)
        for number, (row, answer) in enumerate(zip(windows.rows.tolist(), answers, strict=True), 1):
            begins = row / (data.rate or task.rate) if seconds is None else float(seconds[row])
            place = {"window": number, "row": row + 1, "seconds": round(begins, 6)}
            yield {**none, "patient": patient or None, **place, **answer}


def _means(rows: Sequence[Row], task: SeriesFolder) -> Iterator[Row]:
    """Yield a row for each recording of a patient: what its windows say on average."""
    whole = [row for row in rows if row["error"] is None]
    for (recording, patient), own in groupby(whole, key=lambda row: (row["recording"], row["patient"])):
        yield {"recording": recording, "patient": patient, **task.together(list(own))}
