"""Predict the windows of recordings, and average the predictions of all windows of a recording."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medsilo.core import files
from medsilo.core.errors import DataError, MedsiloError
from medsilo.tasks.sources import DataSource
from medsilo_lab.deploy.predictor import Predictor
from medsilo_series.recordings import KINDS, Reader
from medsilo_series.series_folder import SeriesFolder

RECORDINGS = "recordings.csv"
COLUMNS = ("recording", "patient", "window", "row", "seconds", "error")


class SeriesPredictor(Predictor):
    """Predicts every window of the given recordings, which are files or folders with recordings.

    If the hospital took part in training, signals are standardised with the statistics that were stored in training. If
    the hospital did not take part, signals are standardised with the statistics of the hospital's recordings.
    """

    cases = "recordings"

    def predict(self) -> int:
        task = self.source.plan.task
        assert isinstance(task, SeriesFolder)
        if not (given := self.files(KINDS)):
            raise MedsiloError(f"no recordings; give files ({', '.join(KINDS)}), or folders that hold them")
        scales = self.scales(lambda: task.scales_of([]))
        rows = self.predict_rows(given, lambda path: _predicted(self, task, path, scales), COLUMNS)
        files.write_csv(self.out / RECORDINGS, list(_means(rows, task)), ("recording", "patient"))
        return sum(row["error"] is not None for row in rows)


Row = dict[str, Any]


def _predicted(predictor: Predictor, task: SeriesFolder, path: Path, scales: tuple[Tensor, Tensor]) -> Iterator[Row]:
    """Yield a row for each window of a recording in the order of time. An unreadable recording has a single row, which
    contains the error.
    """
    data = predictor.data or DataSource(folder=path.parent)
    none: Row = {**dict.fromkeys(COLUMNS), "recording": path.name}
    try:
        found = list(task.windows(path, Reader(task.limits, data, task.rate, label=False)))
        if not any(len(windows.inputs) for _, _, windows in found):
            raise DataError(f"a recording has no {task.window} consecutive time steps without a gap")
    except DataError as error:
        yield {**none, "error": str(error), "detail": error.private}
        return
    for patient, recording, windows in found:
        seconds = recording.seconds
        inputs = task.finished(torch.from_numpy(windows.inputs), scales)
        answers = predictor.answers(inputs, task.target)
        for number, (row, answer) in enumerate(zip(windows.rows.tolist(), answers, strict=True), 1):
            begins = row / (data.rate or task.rate) if seconds is None else float(seconds[row])
            place = {"window": number, "row": row + 1, "seconds": round(begins, 6)}
            yield {**none, "patient": patient or None, **place, **answer}


def _means(rows: Sequence[Row], task: SeriesFolder) -> Iterator[Row]:
    """Yield a row for each patient of a recording, with the mean of the predictions for all windows of the patient."""
    whole = [row for row in rows if row["error"] is None]
    for (recording, patient), own in groupby(whole, key=lambda row: (row["recording"], row["patient"])):
        yield {"recording": recording, "patient": patient, **task.together(list(own))}
