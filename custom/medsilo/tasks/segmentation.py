"""Tasks that find structures in images: masks."""

import warnings
from typing import ClassVar

import torch
from torch import Tensor

from medsilo.tasks.metrics import Measures
from medsilo.tasks.task import Task

SURFACE = ("hd95", "surface_dice")
FURTHEST = 1e5  # millimetres or pixels that two surfaces of one image can be apart
FAR = 100.0  # the same, from where on it is all one in what is told of patients


def likeliest(output: Tensor) -> Tensor:
    """Return the label with the greatest output at every place, the first of several.

    `argmax` gives the same, and on a CPU takes ten times as long over channels.
    """
    return output.max(1).indices


def dice_of(found: Tensor, right: Tensor) -> Tensor:
    """Return Dice of every case and structure; a structure that is missing and not found has 1."""
    from monai.metrics import compute_dice

    return compute_dice(found, right, include_background=True, ignore_empty=False).float()


class Segmentation(Task):
    """Dice of every structure and their mean; of test cases the distances of surfaces too, all by MONAI.

    Targets are labels [batch, *grid]; output is [batch, classes, *grid]. A structure is one label or several.
    """

    metric: ClassVar[str] = "dice"
    segments: ClassVar[bool] = True
    # The labels of each structure; the retina's disc, for example, holds its cup.
    structures: ClassVar[dict[str, tuple[int, ...]]] = {"structure": (1,)}

    @property
    def voxel(self) -> tuple[float, ...] | None:
        """Millimetres between the target's places along each axis; None where they are pixels of unknown size."""
        return None

    @property
    def tolerance(self) -> float:
        """Return how far a surface may be off and still count in surface Dice, in millimetres or pixels."""
        return 2.0

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.outputs, *shape[1:])

    def found(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the label that is found at each place, [batch, *grid]; 0 where the target does not count."""
        return likeliest(output)

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return dice_of(self.masks(self.found(output, target)), self.masks(target)).mean(1)

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        return self.compared(self.found(output, target), target, self.voxel)

    def compared(self, labels: Tensor, target: Tensor, voxel: tuple[float, ...] | None) -> Measures:
        """Return how near labels are to the target, both [batch, *grid]: the metric, Dice of every structure where
        there are several, and surfaces, in millimetres or voxels. voxel: as `voxel`."""
        from monai.metrics import compute_hausdorff_distance, compute_surface_dice

        warnings.filterwarnings("ignore", "monai.metrics.utils get_mask_edges")  # MONAI warns of its own call
        found, right = (self.masks(one).cpu() for one in (labels, target))
        dice = dice_of(found, right)
        there, found_there = (masks.flatten(2).any(2) for masks in (right, found))
        both = there & found_there
        # No surface, no distance; but a structure that is missed, or found where none is, has surface Dice 0.
        distances = torch.full(both.shape, torch.nan)
        near = torch.where(there | found_there, 0.0, torch.nan)
        if both.any():
            pair = found[both][:, None], right[both][:, None]
            far = compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=voxel)
            close = compute_surface_dice(*pair, [self.tolerance], include_background=True, spacing=voxel)
            distances[both], near[both] = far[:, 0].float(), close[:, 0].float()
        columns = {SURFACE[0]: distances, SURFACE[1]: near}
        if len(self.structures) > 1:
            columns["dice"] = dice
        measures = {self.metric: dice.mean(1)}
        for name, values in columns.items():
            for structure, column in zip(self.structures, values.unbind(1), strict=True):
                measures[self._name(name, structure)] = column
        return measures

    @property
    def layout(self) -> dict[str, int]:
        several = ("dice", *SURFACE) if len(self.structures) > 1 else SURFACE
        return {**super().layout, **{self._name(name, part): 2 for name in several for part in self.structures}}

    def range_of(self, name: str) -> tuple[float, float]:
        return (0.0, FURTHEST) if name.startswith(SURFACE[0]) else super().range_of(name)

    def told_range(self, name: str) -> tuple[float, float]:
        return (0.0, FAR) if name.startswith(SURFACE[0]) else super().told_range(name)

    def masks(self, labels: Tensor) -> Tensor:
        return torch.stack([torch.isin(labels, labels.new_tensor(part)) for part in self.structures.values()], 1)

    def _name(self, name: str, structure: str) -> str:
        return f"{name}_{structure}" if len(self.structures) > 1 else name
