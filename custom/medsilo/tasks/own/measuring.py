"""Losses, networks and measures of tasks whose plan says what kind they are; the data are those tasks' own."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from medsilo.models.densenet121 import DenseNet121
from medsilo.models.network import Dimensions, Network
from medsilo.models.unet import UNet
from medsilo.tasks.classification import Classification
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.task import SiteData, Task


class _Judge(Task):
    title: ClassVar[str] = "of another task"

    names: tuple[str, ...]
    axes: Dimensions

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        raise TypeError("this measures and has no data")


class StructureJudge(_Judge, Segmentation):
    """A segmentation with these structures, which have the labels 1, 2, ..."""

    lengths: tuple[float, ...] | None  # millimetres between places of the output
    criterion: str

    @property
    def structures(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        """One label each."""
        return {name: (number,) for number, name in enumerate(self.names, 1)}

    @property
    def voxel(self) -> tuple[float, ...] | None:
        return self.lengths

    def default_network(self) -> Network:
        return UNet(dimensions=self.axes)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.criterion == "cross-entropy":
            return functional.cross_entropy(output, target)
        return _dice(self.criterion)(output, target[:, None])

    @property
    def cross_entropy(self) -> float:
        return 1.0 if self.criterion in ("dice-ce", "cross-entropy") else 0.0


class ClassJudge(_Judge, Classification):
    """A classification into these classes: 0, 1, ..."""

    @property
    def classes(self) -> int:  # type: ignore[override]
        """Return how many there are."""
        return len(self.names)

    def default_network(self) -> Network:
        return DenseNet121(dimensions=self.axes)


@cache
def _dice(criterion: str) -> nn.Module:
    """MONAI's Dice loss of the structures, alone, with the background as one more, or with cross entropy."""
    from monai.losses import DiceCELoss, DiceLoss

    kind = DiceCELoss if criterion == "dice-ce" else DiceLoss
    return kind(include_background=criterion == "dice-background", to_onehot_y=True, softmax=True)
