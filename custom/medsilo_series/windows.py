"""Cut recordings into windows that contain no gap, no missing value, and only one label and one patient."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from medsilo.extend import DataError
from medsilo_series.recordings import Coded, Recording

Missing = Literal["leave-out", "split"]


@dataclass(frozen=True)
class Cutting:
    """The lengths and factors that determine how a recording is cut into windows. Before cutting, recordings are
    resampled by the factor up / down.
    """

    window: int
    step: int
    missing: Missing = "leave-out"
    up: int = 1
    down: int = 1


@dataclass(frozen=True)
class Windows:
    inputs: np.ndarray  # [windows, signals, steps]
    labels: np.ndarray  # [windows]; index of the window's label, or 0 if the recording has no labels
    rows: np.ndarray  # [windows]; row number of each window's first step
    gaps: int  # number of gaps in time plus number of rows that have missing values
    short: int  # number of sequences shorter than a window; a sequence is consecutive rows with one label and no gap


def cut(recording: Recording, cutting: Cutting, own: np.ndarray, usable: Sequence[bool] | None = None) -> Windows:
    """Cut the selected rows of a recording into windows.

    Args:
        own: A mask of the rows to use, such as those of a patient.
        usable: For each label, True if rows with this label are used. None ignores labels.

    At the end of each unbroken sequence of rows, rows that do not fill a window are not used.
    """
    values, labels = recording.values, recording.labels if usable is not None else None
    known = ~np.isnan(values).any(1)
    gaps = 0 if recording.gaps is None else int(recording.gaps[own].sum())
    if cutting.missing == "leave-out":
        if not known[own].all():
            raise DataError(
                "recordings have missing or impossible values; correct them, or agree on task.missing=split"
            )
        if gaps:
            raise DataError("recordings have gaps in time; correct them, or agree on task.missing=split")
    none = np.zeros((0, values.shape[1], cutting.window), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    found, short = [none], 0
    for first, last in stretches(recording.begins, own & known):
        if -(-(last - first) * cutting.up // cutting.down) < cutting.window:
            continue
        steps = resampled(values[first:last], cutting)
        rows = first + np.arange(len(steps)) * cutting.down // cutting.up
        for begin, end, place in _runs(rows, labels, usable):
            if end - begin < cutting.window:
                short += 1
                continue
            views = np.lib.stride_tricks.sliding_window_view(steps[begin:end], cutting.window, axis=0)[:: cutting.step]
            starts = rows[begin : end - cutting.window + 1 : cutting.step]
            found.append((views, np.full(len(views), place), starts))
    inputs, places, rows = (np.concatenate(several) for several in zip(*found, strict=True))
    unknown = int((own & ~known).sum())
    return Windows(np.ascontiguousarray(inputs, np.float32), places, rows, gaps + unknown, short)


def _runs(rows: np.ndarray, labels: Coded | None, usable: Sequence[bool] | None) -> Iterator[tuple[int, int, int]]:
    """For each unbroken sequence of steps that share one used label, yield the first step, the step after the last
    step, and the label's index.

    Args:
        rows: For each step, the index of its row.
        labels: The labels of the recording; None if it has no labels.
        usable: For each label, whether its rows are used.
    """
    codes = np.zeros(len(rows), np.int64) if labels is None else labels.rows[rows].astype(np.int64)
    changes = np.flatnonzero(np.diff(codes)) + 1
    for first, last in pairwise([0, *changes.tolist(), len(rows)]):
        place = int(codes[first])
        if labels is None or usable is None or usable[place]:
            yield first, last, place


def stretches(begins: np.ndarray, used: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the limits [start, end) of each unbroken sequence of rows that may be used."""
    changed = begins.copy()
    changed[1:] |= used[1:] != used[:-1]
    edges = [*np.flatnonzero(changed).tolist(), len(used)]
    if edges[0] != 0:
        edges = [0, *edges]
    for first, last in pairwise(edges):
        if last > first and used[first]:
            yield first, last


def resampled(values: np.ndarray, cutting: Cutting) -> np.ndarray:
    if cutting.up == cutting.down:
        return values
    from scipy.signal import resample_poly

    return resample_poly(values.astype(np.float64), cutting.up, cutting.down, axis=0).astype(np.float32)
