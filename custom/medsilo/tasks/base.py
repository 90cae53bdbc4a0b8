"""What a task is: data, network, loss and metric of one medical question. It knows nothing of federations."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from medsilo.errors import DataError
from medsilo.models.base import Network
from medsilo.section import Section


class Cases(TensorDataset):
    """Cases that lie in memory: inputs, targets and the patient each case belongs to."""

    def __init__(self, inputs: Tensor, targets: Tensor, patients: Sequence[str]) -> None:
        super().__init__(inputs, targets)
        if len(patients) != len(inputs):
            raise ValueError(f"{len(inputs)} cases but {len(patients)} patients")
        self.patients = tuple(patients)

    @property
    def inputs(self) -> Tensor:
        return self.tensors[0]

    @property
    def targets(self) -> Tensor:
        return self.tensors[1]


@dataclass(frozen=True)
class SiteData:
    """The three parts of one site's data; no patient is in two of them."""

    train: Dataset
    validation: Dataset
    test: Dataset


class Task(Section):
    """A task of the plan: its name and its numbers. Subclasses declare `name: Literal["..."] = "..."`."""

    title: ClassVar[str]
    metric: ClassVar[str]  # the name of what `case_scores` measures; higher is better
    synthetic: ClassVar[bool] = False
    channels: ClassVar[int]
    classes: ClassVar[int]

    reads_images: ClassVar[bool] = False  # whether `inputs_of` takes image files

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one case's input; None when cases differ."""
        return None

    @abstractmethod
    def default_network(self) -> Network:
        """The network that this task uses when the plan names none."""

    @abstractmethod
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        """One site's data. `sites` are all the study's sites in sorted order; `folder` is the site's data folder."""

    def inputs_of(self, values: np.ndarray) -> Tensor:
        """What the network reads of one image file, [cases, *shape]: for training and prediction alike.

        values: a volume [channels, D, H, W] or a flat image [channels, H, W], as tasks.scans reads them.
        """
        raise DataError(f"task {self.name} reads no image files")  # type: ignore[attr-defined]

    def labels_of(self, output: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The label of each place of that image, from the network's output for its cases: [*grid]."""
        raise DataError(f"task {self.name} finds no masks")  # type: ignore[attr-defined]

    def monai_transforms(self) -> list[dict[str, Any]] | None:
        """What `inputs_of` does to a volume in a MONAI bundle's words: invertible, the image's key is "image", slices
        last. None where MONAI has no such transforms."""
        return None

    @property
    def spacing(self) -> tuple[tuple[float, float], ...] | None:
        """The least and greatest spacing of the task's images along x, y (and z) in mm; None when it isn't known."""
        return None

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The scalar that training minimises: a mean over the batch."""

    @abstractmethod
    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """The metric of every case of a batch: [batch], float32."""


def dice_per_case(output: Tensor, target: Tensor) -> Tensor:
    """Dice of class 1 in every case of two-class logits [batch, 2, ...]; a mask that is empty and found empty is 1."""
    from monai.metrics import compute_dice

    found = functional.one_hot(output.argmax(1), 2).movedim(-1, 1)
    right = functional.one_hot(target, 2).movedim(-1, 1)
    # ignore_empty=False: an empty mask found empty is 1, not NaN.
    return compute_dice(found, right, include_background=False, ignore_empty=False)[:, 0].float()


def accuracy_per_case(output: Tensor, target: Tensor) -> Tensor:
    """1 where the class with the highest score is the right one: [batch]."""
    return (output.argmax(1) == target).to(torch.float32)
