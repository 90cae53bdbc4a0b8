"""Activities of nine people with three motion sensors: PAMAP2's protocol recordings, dealt to simulated sites."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from medsilo.extend import Classification, DataError, SiteData
from medsilo_papers.public_files import PooledTask, files_in, site_folder

COLUMNS = 54  # time, activity, heart rate, and 17 numbers each of the sensors at hand, chest and ankle
# Of each sensor the acceleration (16 g), the gyroscope and the magnetometer, three axes each.
CHANNELS = [start + axis for start in (3, 20, 37) for axis in (1, 2, 3, 7, 8, 9, 10, 11, 12)]
# Lying, sitting, standing, walking, cycling, Nordic walking, descending stairs, vacuuming, ironing, rope jumping.
ACTIVITIES = (1, 2, 3, 4, 6, 7, 13, 16, 17, 24)
LAYOUT = "subject101.dat to subject109.dat (the folder Protocol of PAMAP2_Dataset)"


class Pamap2(PooledTask):
    """Windows [27, steps] at 100 Hz of ten activities; a window is of one activity, gaps are filled linearly.

    Numbers stay in the sensors' units (m/s2, rad/s, microtesla): the network's first norm brings them to one scale.
    """

    needs_data: ClassVar[bool] = True
    title: ClassVar[str] = "PAMAP2: ten activities from three motion sensors, dealt to sites"
    channels: ClassVar[int] = len(CHANNELS)
    goal: ClassVar[Classification] = Classification(len(ACTIVITIES))

    name: Literal["pamap2"] = "pamap2"
    steps: int = Field(default=200, ge=4, le=10_000, description="of a window; 200 follows from the paper's network")
    stride: int = Field(default=100, ge=1, le=10_000, description="steps from window to window, not in the paper")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.steps)

    def default_network(self) -> str:
        return "activity-cnn"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        place = site_folder(self.name, site, sites, folder, lambda path: bool(_recordings(path)), LAYOUT)
        files = tuple((path, path.stat().st_mtime_ns) for path in _recordings(place))
        windows, labels, subjects = windows_of(files, self.steps, self.stride)
        if not len(labels):
            raise DataError(f"no recording has {self.steps} steps in a row of one of the ten activities")
        parts = self.dealt(labels, subjects, site, sites, seed)
        return SiteData.by_patient(windows, labels, np.arange(len(labels)), subjects, parts)


def _recordings(place: Path) -> list[Path]:
    return files_in(place, "subject1??.dat") or files_in(place, "Protocol/subject1??.dat")


@lru_cache(maxsize=1)  # twenty sites of one simulation read the same nine files
def windows_of(
    files: tuple[tuple[Path, int], ...], steps: int, stride: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """All windows [n, 27, steps] of these recordings (each with the time of its last change), labels, subjects."""
    windows: list[np.ndarray] = [np.zeros((0, len(CHANNELS), steps), np.float32)]
    labels: list[int] = []
    subjects: list[str] = []
    for path, _ in files:
        activity, values = _read(path)
        ends = np.flatnonzero(np.diff(activity)) + 1
        for run in np.split(np.arange(len(activity)), ends):
            if len(run) < steps or activity[run[0]] not in ACTIVITIES:
                continue
            filled = _filled(values[run])
            starts = np.arange(0, len(run) - steps + 1, stride)
            windows.append(np.stack([filled[start : start + steps].T for start in starts]))
            labels += [ACTIVITIES.index(int(activity[run[0]]))] * len(starts)
            subjects += [path.stem] * len(starts)
    return np.concatenate(windows), np.array(labels, np.int64), tuple(subjects)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The activity of every step, [n], and the sensors' values, [n, 27]."""
    try:
        with path.open(encoding="ascii") as file:
            columns = len(file.readline().split())
            if columns != COLUMNS:
                raise DataError(f"a recording has {columns} columns, expected {COLUMNS} as in {LAYOUT}", str(path))
            file.seek(0)
            table = np.loadtxt(file, dtype=np.float32, usecols=[1, *CHANNELS], ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"a recording is damaged; expected {LAYOUT}", f"{path}: {error}") from error
    return table[:, 0].astype(np.int64), table[:, 1:]


def _filled(values: np.ndarray) -> np.ndarray:
    """Missing values on a line between their neighbours in time; a channel without any is an error."""
    missing = np.isnan(values)
    if missing.all(0).any():
        raise DataError("a sensor has no values during an activity; remove that recording")
    steps = np.arange(len(values))
    for channel in np.flatnonzero(missing.any(0)):
        gap = missing[:, channel]
        values[gap, channel] = np.interp(steps[gap], steps[~gap], values[~gap, channel])
    return values
