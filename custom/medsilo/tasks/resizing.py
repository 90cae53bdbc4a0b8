"""Images and labels on another grid over the same place; what has that grid already stays as it is."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Return images [B, C, *grid] on another grid, (tri)linear and not smoothed."""
    if tuple(images.shape[2:]) == tuple(size):
        return images
    mode = "trilinear" if len(size) == 3 else "bilinear"
    return functional.interpolate(images, tuple(size), mode=mode, align_corners=False)


def resized_to_nearest(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Return labels [B, C, *grid] on another grid: each place takes the label of the nearest one."""
    same = tuple(labels.shape[2:]) == tuple(size)
    return labels if same else functional.interpolate(labels, tuple(size), mode="nearest-exact")


def resized_smoothly(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Return an image [C, H, W] at this height and width, bilinear, smoothed when it becomes smaller."""
    if tuple(image.shape[1:]) == size:
        return image
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]


def resized_to_majority(labels: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Return labels [H, W] at this height and width, int64: each takes the places where it covers most."""
    same = torch.from_numpy(np.ascontiguousarray(labels))
    if labels.shape == size:
        return same.long()
    known = np.unique(labels)
    masks = torch.stack([(same == int(label)).float() for label in known])
    most = functional.interpolate(masks[None], size, mode="area")[0].argmax(0)
    return torch.from_numpy(known)[most].long()
