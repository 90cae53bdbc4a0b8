"""Crop random patches from training images, and apply networks to whole images by sliding windows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

WINDOWS = 4  # number of sliding windows in one batch


def grid_at(grid: Sequence[int], spacing: Sequence[float], wanted: Sequence[float]) -> tuple[int, ...]:
    """Return the number of voxels along each axis after resampling to the wanted spacing; 0 leaves an axis
    unchanged.
    """
    axes = zip(grid, spacing, wanted, strict=True)
    return tuple(max(1, round(places * own / new)) if new else places for places, own, new in axes)


def middle_of(image: Tensor, size: Sequence[int]) -> Tensor:
    """Crop the centre of an image [..., *grid]; if the image is too small, pad it with its least value."""
    starts = [(own - wanted) // 2 for own, wanted in zip(image.shape[-len(size) :], size, strict=True)]
    return _cut(image, [max(start, 0) for start in starts], size, middle=True)


def _shown_in(labels: Tensor) -> np.ndarray:
    """Return a Boolean mask [*grid] that is true at the voxels of structures. Higher bits than the lowest eight are
    ignored, because they mark structures without annotations.
    """
    return ((labels if labels.is_floating_point() else labels.to(torch.uint8)) > 0).numpy()


def patch(case: tuple[Tensor, Tensor], size: Sequence[int], foreground: float, seed: int) -> tuple[Tensor, Tensor]:
    """Crop one random patch from both an image [C, *grid] and its labels [*grid]; images that are smaller than the
    patch are padded.

    With probability `foreground`, the patch is centred on a random voxel of a structure, as nearly as the image's edges
    allow. Otherwise, its position is random.
    """
    image, labels = case
    random = np.random.default_rng(seed)
    grid = labels.shape
    inside, place = random.random() < foreground, random.random(len(grid) + 1)
    centre = _one_of(_shown_in(labels), place[0]) if inside else None
    starts = []
    for axis, (own, wanted) in enumerate(zip(grid, size, strict=True)):
        last = max(own - wanted, 0)
        start = int(place[axis + 1] * (last + 1)) if centre is None else centre[axis] - wanted // 2
        starts.append(min(max(start, 0), last))
    return _cut(image, starts, size), _cut(labels, starts, size, 0)


def _one_of(mask: np.ndarray, position: float) -> list[int] | None:
    """Return the indices of a random voxel of a mask, or None if the mask is empty.

    The function first chooses a plane of the mask, because a list of all voxels would need much memory.
    """
    # a loop over planes is five times as fast as counting the whole mask at once
    ends = np.cumsum([np.count_nonzero(plane) for plane in mask])
    if not (total := int(ends[-1])):
        return None
    rank = min(int(position * total), total - 1)
    plane = int(np.searchsorted(ends, rank, side="right"))
    # a negative index, which counts from the plane's last voxel
    inside = np.argwhere(mask[plane])[rank - int(ends[plane])]
    return [plane, *inside.tolist()]


def _cut(
    image: Tensor, starts: Sequence[int], size: Sequence[int], fill: float | None = None, middle: bool = False
) -> Tensor:
    """Copy a box from an image; where the box exceeds the image, pad the copy.

    Args:
        starts: The first index of the box along each axis.
        fill: The padding value, by default the least value of the image.
        middle: True to pad at both ends of each axis, and False to pad at the last index only.
    """
    box = image
    for axis, (start, wanted) in enumerate(zip(starts, size, strict=True), image.ndim - len(size)):
        box = box.narrow(axis, start, min(wanted, image.shape[axis] - start))
    lacking = [wanted - own for own, wanted in zip(box.shape[-len(size) :], size, strict=True)]
    if not any(lacking):
        return box.clone(memory_format=torch.contiguous_format)
    sides = [(lack // 2, lack - lack // 2) if middle else (0, lack) for lack in lacking]
    value = float(image.min()) if fill is None else fill
    return functional.pad(box, [width for pair in reversed(sides) for width in pair], value=value)


def from_windows(network: Callable[[Tensor], Tensor], images: Tensor, size: Sequence[int], overlap: float) -> Tensor:
    """Apply a network to sliding windows of images [B, C, *grid], and merge the outputs by MONAI's method."""
    if tuple(images.shape[2:]) == tuple(size):
        return network(images)
    from monai.inferers import sliding_window_inference

    fill = float(images.min())
    output: Any = sliding_window_inference(
        images, tuple(size), WINDOWS, network, overlap=overlap, mode="gaussian", cval=fill
    )
    return output
