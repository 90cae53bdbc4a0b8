"""Pieces of images for training, and whole images from pieces. All chance comes from a seed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

WINDOWS = 4  # pieces that go through the network together


def grid_at(grid: Sequence[int], spacing: Sequence[float], wanted: Sequence[float]) -> tuple[int, ...]:
    """Return how many places an image has along each axis in another spacing, over the same place; 0: as it is."""
    axes = zip(grid, spacing, wanted, strict=True)
    return tuple(max(1, round(places * own / new)) if new else places for places, own, new in axes)


def middle_of(image: Tensor, size: Sequence[int]) -> Tensor:
    """The middle of an image [..., *grid], with its least value around it where it is smaller."""
    starts = [(own - wanted) // 2 for own, wanted in zip(image.shape[-len(size) :], size, strict=True)]
    return _cut(image, [max(start, 0) for start in starts], size, middle=True)


def _shown_in(labels: Tensor) -> np.ndarray:
    """Return where labels [*grid] show a structure; marks of undrawn ones lie above a label's byte."""
    return ((labels if labels.is_floating_point() else labels.to(torch.uint8)) > 0).numpy()


def patch(case: tuple[Tensor, Tensor], size: Sequence[int], foreground: float, seed: int) -> tuple[Tensor, Tensor]:
    """One piece of an image [C, *grid] and its labels [*grid], both filled up where they are smaller.

    With probability `foreground` a voxel of a structure, drawn from all of them, lies in its middle (or as near to it
    as the image's edge allows); else the place is drawn from all.
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


def _one_of(mask: np.ndarray, place: float) -> list[int] | None:
    """One voxel of a mask; every one is as likely. By its plane, since a list of all of them would be long."""
    ends = np.cumsum([np.count_nonzero(plane) for plane in mask])  # plane by plane, which is five times as fast
    if not (total := int(ends[-1])):
        return None
    rank = min(int(place * total), total - 1)
    plane = int(np.searchsorted(ends, rank, side="right"))
    inside = np.argwhere(mask[plane])[rank - int(ends[plane])]  # counted from the plane's end
    return [plane, *inside.tolist()]


def _cut(
    image: Tensor, starts: Sequence[int], size: Sequence[int], fill: float | None = None, middle: bool = False
) -> Tensor:
    """A box of an image, whole in memory of its own; filled up behind, or all around; by default with its least."""
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
    """The network's output for whole images [B, C, *grid] from windows of one size that overlap, by MONAI."""
    if tuple(images.shape[2:]) == tuple(size):
        return network(images)
    from monai.inferers import sliding_window_inference

    fill = float(images.min())
    output: Any = sliding_window_inference(
        images, tuple(size), WINDOWS, network, overlap=overlap, mode="gaussian", cval=fill
    )
    return output
