"""Predict the windows of recordings, and of each recording the mean of what its windows say; export the model."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from medsilo.extend import (
    DataError,
    DataSource,
    MedsiloError,
    PredictionRequest,
    Predictor,
    columns,
    files_below,
    predicted_rows,
)
from medsilo_series.recordings import KINDS, Reader
from medsilo_series.series_folder import SeriesFolder

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
    scales = predicted_rows.scales_for(asked, lambda: task.scales_of([]))
    rows = predicted_rows.predict_rows(asked, files, lambda path: _predicted(asked, task, path, scales), COLUMNS)
    predicted_rows.write_rows(asked.out / RECORDINGS, list(_means(rows, task)), ("recording", "patient"))
    return predicted_rows.failures(rows)


PREDICTOR = Predictor("recordings", predict_series)


def _below(folder: Path) -> list[Path]:
    return [path for name, path in files_below(folder)[0].items() if name.lower().endswith(KINDS)]


def _predicted(
    asked: PredictionRequest, task: SeriesFolder, path: Path, scales: columns.Scales
) -> Iterator[predicted_rows.Row]:
    """Yield a row for each window of a recording, in time; a recording that can't be read has its reason."""
    data = asked.data or DataSource(folder=path.parent)
    none: predicted_rows.Row = {**dict.fromkeys(COLUMNS), "recording": path.name}
    try:
        found = list(task.windows(path, Reader(task.signals, data, label=False)))
        if not any(len(windows.inputs) for _, _, windows in found):
            raise DataError(f"a recording has no window of {task.window} steps in a row that are whole")
    except DataError as error:
        yield {**none, "error": str(error), "detail": error.private}
        return
    for patient, recording, windows in found:
        seconds = recording.seconds
        inputs = task.finished(torch.from_numpy(windows.inputs), scales)
        answers = predicted_rows.answered(asked, task.target, inputs)
        for number, (row, answer) in enumerate(zip(windows.rows.tolist(), answers, strict=True), 1):
            begins = row / (data.rate or task.rate) if seconds is None else float(seconds[row])
            place = {"window": number, "row": row + 1, "seconds": round(begins, 6)}
            yield {**none, "patient": patient or None, **place, **answer}


def _means(rows: Sequence[predicted_rows.Row], task: SeriesFolder) -> Iterator[predicted_rows.Row]:
    """Yield a row for each recording of a patient: what its windows say on average."""
    whole = [row for row in rows if row["error"] is None]
    for (recording, patient), own in groupby(whole, key=lambda row: (row["recording"], row["patient"])):
        yield {"recording": recording, "patient": patient, **task.together(list(own))}
