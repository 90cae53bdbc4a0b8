"""Define the objective of segmentation, in which networks predict masks of structures in images."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medsilo.learning.compute import labels_in, marks_in
from medsilo.learning.partial_labels import known_in, marginal, marked
from medsilo.tasks.metrics import Measures
from medsilo.tasks.objective import Objective

SURFACE = ("hd95", "surface_dice")
TOLERANCE = 2.0  # tolerance of the surface Dice, in millimetres, or in voxels if the spacing is unknown
FURTHEST = 1e5  # upper limit on distances between surfaces, in millimetres or pixels
FAR = 100.0  # distances are clipped to this limit before disclosure, because it bounds one patient's influence


def likeliest(output: Tensor) -> Tensor:
    """Return the label with the largest output at every pixel or voxel; of equal outputs, the lowest label.

    `argmax` gives the same labels, but takes ten times as long on a CPU.
    """
    return output.max(1).indices


def dice_of(predicted: Tensor, right: Tensor) -> Tensor:
    """Return the Dice score of every case and structure; 1 if a structure is neither present nor predicted."""
    from monai.metrics import compute_dice

    return compute_dice(predicted, right, include_background=True, ignore_empty=False).float()


def dice_and_entropy(output: Tensor, target: Tensor) -> Tensor:
    both = _dice_and_entropy()
    if output.device.type == "cpu":
        return both(output, target[:, None])
    # computes the mean outside cross_entropy, whose order of summation varies on a GPU
    entropies = functional.cross_entropy(output, target.long(), reduction="none")
    return both.dice(output, target[:, None]) + entropies.mean()


@cache
def _dice_and_entropy() -> Any:
    from monai.losses import DiceCELoss

    return DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)


class Segmentation(Objective):
    """Segmentation whose metric is the mean Dice score over structures, computed by MONAI.

    Besides the mean Dice score, the test of a segmentation reports the Dice score of each structure, and distances
    between predicted and true surfaces. Targets are labels [batch, *grid], and outputs are [batch, classes, *grid]. A
    structure has one or more labels.

    >>> from torch.nn.functional import cross_entropy
    >>> Segmentation(2, cross_entropy).output_of((1, 64, 64))
    (2, 64, 64)
    """

    metric = "dice"

    def __init__(
        self,
        labels: int | Sequence[str],
        criterion: Callable[..., Tensor],
        structures: Mapping[str, tuple[int, ...]] | None = None,
        *,
        cross_entropy: float = 0.0,
        outputs: int | None = None,
        voxel: tuple[float, ...] | None = None,
    ) -> None:
        """Create the objective.

        Args:
            labels: the names of the labels including the background, or the number of these labels
            criterion: the loss, a function of outputs and labels, which is called for each resolution of the network's
                outputs; if structures may overlap, its third argument is a list of the annotated structures, or None if
                all are annotated
            structures: the labels of each structure; for example, the optic disc consists of the labels rim and cup; by
                default, label 1 is the only structure
            cross_entropy: the weight of the cross entropy in the loss
            outputs: the number of outputs, which is the number of labels by default
            voxel: the voxel spacing of targets in millimetres along each axis; None if the spacing is unknown
        """
        self.label_names = tuple(map(str, range(labels)) if isinstance(labels, int) else labels)
        self.classes = len(self.label_names)
        self.outputs = outputs or self.classes
        self.criterion, self.cross_entropy, self.voxel = criterion, cross_entropy, voxel
        self.structures = {"structure": (1,)} if structures is None else structures

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.outputs, *shape[1:])

    def loss(self, output: Tensor | list[Tensor], target: Tensor) -> Tensor:
        # only the loss of overlapping structures has a third argument: the annotated structures
        given = 3 if self.overlaps else 2
        return marginal(lambda *told: self.criterion(*told[:given]), output, target, self.overlaps)

    def predicted(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the predicted labels, [batch, *grid]. Subclasses may set labels to 0 at voxels that scores must
        ignore.

        Args:
            output, target: as for `loss`
        """
        return likeliest(output)

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return self._mean(dice_of(self.masks(self.predicted(output, target)), self.masks(target)), target)

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        return self.compared(self.predicted(output, target), target, self.voxel)

    def compared(self, labels: Tensor, target: Tensor, voxel: tuple[float, ...] | None) -> Measures:
        """Compare predicted with true labels.

        Return the metric, distances between surfaces, volumes, and, for several structures, each structure's Dice
        score.

        Args:
            labels: the predicted labels, [batch, *grid]
            target: the true labels, [batch, *grid]
            voxel: the voxel spacing in millimetres, or None, so that distances and volumes are in voxels
        """
        from monai.metrics import compute_hausdorff_distance, compute_surface_dice

        # MONAI's own code causes this warning
        warnings.filterwarnings("ignore", "monai.metrics.utils get_mask_edges")
        found, right = (self.masks(one).cpu() for one in (labels, target))
        dice = dice_of(found, right)
        there, found_there = (masks.flatten(2).any(2) for masks in (right, found))
        both = there & found_there
        # If only one of the two masks contains a structure, its surface Dice is 0, and its surface distance is
        # undefined. If neither mask does, both are undefined.
        distances = torch.full(both.shape, torch.nan)
        near = torch.where(there | found_there, 0.0, torch.nan)
        if both.any():
            pair = found[both][:, None], right[both][:, None]
            far = compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=voxel)
            close = compute_surface_dice(*pair, [TOLERANCE], include_background=True, spacing=voxel)
            distances[both], near[both] = far[:, 0].float(), close[:, 0].float()
        columns = {SURFACE[0]: distances, SURFACE[1]: near}
        unit, one = ("ml", math.prod(voxel) / 1000) if voxel and len(voxel) == 3 else ("voxels", 1.0)
        for name, own in (("there", right), ("found", found)):
            columns[f"{unit}_{name}"] = own.flatten(2).sum(2, dtype=torch.float64) * one
        if len(self.structures) > 1:
            columns["dice"] = dice
        measures, judged = {self.metric: self._mean(dice, target)}, self.judged(target)
        for name, values in columns.items():
            seen = values if judged is None else values.where(judged, torch.nan)
            for structure, column in zip(self.structures, seen.unbind(1), strict=True):
                measures[self.name_of(name, structure)] = column
        return measures

    @property
    def layout(self) -> dict[str, int]:
        several = ("dice", *SURFACE) if len(self.structures) > 1 else SURFACE
        return {**super().layout, **{self.name_of(name, part): 2 for name in several for part in self.structures}}

    def range_of(self, name: str) -> tuple[float, float]:
        return (0.0, FURTHEST) if name.startswith(SURFACE[0]) else super().range_of(name)

    def told_range(self, name: str) -> tuple[float, float]:
        return (0.0, FAR) if name.startswith(SURFACE[0]) else super().told_range(name)

    def masks(self, labels: Tensor) -> Tensor:
        """Convert labels to one mask for each structure, [batch, structures, *grid]."""
        labels = labels_in(labels)
        return torch.stack([torch.isin(labels, labels.new_tensor(part)) for part in self.structures.values()], 1)

    def judged(self, target: Tensor) -> Tensor | None:
        """Return a Boolean tensor [batch, structures]: whether a structure was annotated in a case.

        None if all structures were annotated in all cases.
        """
        if not any(marks_in(target)):
            return None
        if self.overlaps:
            return known_in(target, self.outputs + 1)[:, 1:]
        known = known_in(target, self.classes)
        return torch.stack([known[:, list(part)].all(1) for part in self.structures.values()], 1)

    @staticmethod
    def mark_in(labels: Tensor) -> int:
        """Return the bits in a case's labels that mark structures without annotations."""
        return marks_in(labels[None])[0]

    marked = staticmethod(marked)

    def _mean(self, dice: Tensor, target: Tensor) -> Tensor:
        judged = self.judged(target)
        return dice.mean(1) if judged is None else dice.where(judged.to(dice.device), torch.nan).nanmean(1)
