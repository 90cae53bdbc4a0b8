"""Tasks that find structures in images: masks."""

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
TOLERANCE = 2.0  # millimetres or pixels that a surface may be off and still count in surface Dice
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


def dice_and_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return MONAI's Dice loss of the structures and cross entropy, added."""
    both = _dice_and_entropy()
    if output.device.type == "cpu":
        return both(output, target[:, None])
    # a card adds the entropies of places up in changing order where torch takes their mean with them
    entropies = functional.cross_entropy(output, target.long(), reduction="none")
    return both.dice(output, target[:, None]) + entropies.mean()


@cache
def _dice_and_entropy() -> Any:
    from monai.losses import DiceCELoss

    return DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)


class Segmentation(Objective):
    """Dice of every structure and their mean; of test cases the distances of surfaces too, all by MONAI.

    Targets are labels [batch, *grid]; output is [batch, classes, *grid]. A structure is one label or several.

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
        """labels: their names, or how many there are, with the background; criterion: the loss of outputs and labels,
        and where structures may lie in each other of those that were drawn (None: all); of each resolution, if several.

        structures: the labels of each; the retina's disc, for example, holds its cup. By default there is one, label 1.
        cross_entropy: how much that of labels counts in the loss; outputs: where they are not the labels.
        voxel: millimetres between the target's places along each axis; None where they are pixels of unknown size.
        """
        self.label_names = tuple(map(str, range(labels)) if isinstance(labels, int) else labels)
        self.classes = len(self.label_names)
        self.outputs = outputs or self.classes
        self.criterion, self.cross_entropy, self.voxel = criterion, cross_entropy, voxel
        self.structures = {"structure": (1,)} if structures is None else structures

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.outputs, *shape[1:])

    def loss(self, output: Tensor | list[Tensor], target: Tensor) -> Tensor:
        given = 3 if self.overlaps else 2  # of outputs, labels, and which structures these are of
        return marginal(lambda *told: self.criterion(*told[:given]), output, target, self.overlaps)

    def predicted(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the label that is found at each place, [batch, *grid]; 0 where the target does not count."""
        return likeliest(output)

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return self._mean(dice_of(self.masks(self.predicted(output, target)), self.masks(target)), target)

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        return self.compared(self.predicted(output, target), target, self.voxel)

    def compared(self, labels: Tensor, target: Tensor, voxel: tuple[float, ...] | None) -> Measures:
        """Return how near labels are to the target, both [batch, *grid]: the metric, Dice of every structure where
        there are several, and surfaces, in millimetres or voxels. voxel: as of the goal."""
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
        """Return where each structure is, [batch, structures, *grid], by the label of each place."""
        labels = labels_in(labels)
        return torch.stack([torch.isin(labels, labels.new_tensor(part)) for part in self.structures.values()], 1)

    def judged(self, target: Tensor) -> Tensor | None:
        """Return which structures were drawn in each case, so that they can be judged; None where all were."""
        if not any(marks_in(target)):
            return None
        if self.overlaps:
            return known_in(target, self.outputs + 1)[:, 1:]
        known = known_in(target, self.classes)
        return torch.stack([known[:, list(part)].all(1) for part in self.structures.values()], 1)

    @staticmethod
    def mark_in(labels: Tensor) -> int:
        """Return the mark of a case's labels, which is added to them where its hospital did not draw all."""
        return marks_in(labels[None])[0]

    marked = staticmethod(marked)

    def _mean(self, dice: Tensor, target: Tensor) -> Tensor:
        """Return each case's mean over the structures that can be judged in it."""
        judged = self.judged(target)
        return dice.mean(1) if judged is None else dice.where(judged.to(dice.device), torch.nan).nanmean(1)
