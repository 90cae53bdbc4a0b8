"""Recognise activities from windows of a person's sensor signals; each site has one .npz file."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend import Classification, Classifying, DataError, SiteData, classification
from medsilo_papers.public_files import arrays_of, site_folder

ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class ActivityWindows(Classifying):
    """Windows of sensor signals, [sensors, steps], which a site reads from the file `<site>.npz` in its data folder.

    The file contains x_train [n, sensors, steps] (floating point), y_train [n] (0, 1, ...), x_test and y_test. A site
    is one person, so training data and test data come from the same person. The fraction `validation` of x_train
    becomes the validation data; the plan's seed and the site's name determine this random choice. This class does not
    normalise windows, so the values in the file must be normalised.
    """

    needs_data: ClassVar[bool] = True
    title: ClassVar[str] = "Activity recognition from recorded sensor windows"

    name: Literal["activity-windows"] = "activity-windows"
    sensors: int = Field(default=9, ge=1, le=4096, description="number of sensor signals in a window")
    activities: int = Field(default=6, ge=2, le=4096, description="number of classes; labels count from 0")
    validation: float = Field(
        default=0.2, gt=0, lt=1, description="share of the training windows that medsilo uses for validation"
    )

    @property
    def mixes_patients(self) -> bool:
        return True

    @property
    def channels(self) -> int:
        return self.sensors

    @property
    def goal(self) -> Classification:
        return classification(tuple(map(str, range(self.activities))), self.score)

    def default_network(self) -> str:
        return "activity-cnn"

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        file = f"{site}.npz"
        place = site_folder(self.name, site, sites, folder, lambda path: (path / file).is_file(), "<site>.npz")
        x_train, y_train, x_test, y_test = arrays_of(place / file, ARRAYS)
        inputs, targets = self._checked("train", x_train, y_train)
        test_inputs, test_targets = self._checked("test", x_test, y_test)
        if test_inputs.shape[1:] != inputs.shape[1:]:
            raise DataError("x_test and x_train have windows of different length; make them equal")
        kept = max(1, round(self.validation * len(inputs)))
        if kept >= len(inputs):
            raise DataError(f"x_train has {len(inputs)} window(s): too few for training and validation")
        drawn = torch.Generator().manual_seed(self.seed_for(seed, site, "validation"))
        order = torch.randperm(len(inputs), generator=drawn)
        parts = [order[kept:].sort().values, order[:kept].sort().values]
        pairs = [*((inputs[part], targets[part]) for part in parts), (test_inputs, test_targets)]
        return SiteData.in_memory((own, labels, [site] * len(own)) for own, labels in pairs)

    def _checked(self, part: str, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        if inputs.ndim != 3 or inputs.shape[1] != self.sensors or inputs.dtype.kind != "f":
            raise DataError(
                f"x_{part} is {inputs.dtype} {list(inputs.shape)}, expected floating numbers [windows, {self.sensors}, "
                "steps]; correct the file or task.sensors"
            )
        if targets.shape != (len(inputs),) or targets.dtype.kind not in "iu" or not len(targets):
            raise DataError(f"y_{part} is {targets.dtype} {list(targets.shape)}, expected {len(inputs)} whole numbers")
        if targets.min() < 0 or targets.max() >= self.activities:
            raise DataError(f"y_{part} has labels outside 0 to {self.activities - 1}; correct task.activities")
        windows = torch.from_numpy(np.ascontiguousarray(inputs, np.float32))
        if not windows.isfinite().all():
            raise DataError(f"x_{part} holds NaN or infinity; remove those windows")
        return windows, torch.from_numpy(targets.astype(np.int64))
