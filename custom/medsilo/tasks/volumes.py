"""Images and masks on grids: a case's files in one place, other grids, NIfTI files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from medsilo.core.errors import DataError
from medsilo.tasks.listing import Entry
from medsilo.tasks.scans import Scan, read_scan


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


SAME_PLACE = 1e-2  # in millimetres
GREATEST = 65_535  # value of a mask


def write_volume(path: Path, values: np.ndarray, spacing: Sequence[float]) -> None:
    """Write a volume [D, H, W] as NIfTI: x grows to the left, y to the back, z to the head; spacing: along x, y, z."""
    import nibabel

    x, y, z = spacing
    nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0), np.diag([-x, -y, z, 1.0])), path)


def slices_of(values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """The slices of a volume [C, D, H, W] as a network for `shape` = (C, size, size) reads them: [D, C, size, size]."""
    if values.ndim != 4:
        raise DataError("a flat image, where the task reads volumes")
    if len(values) != shape[0]:
        raise DataError(f"the image has {len(values)} channels, the task reads {shape[0]}")
    return resized(torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))), shape[1:])


def mask_of(path: Path) -> Scan:
    """Read a mask: whole numbers [1, (D,) H, W]."""
    try:
        mask = read_scan(path)
    except DataError as error:
        raise DataError(str(error).replace("an image", "a mask"), error.private) from error
    if len(mask.values) != 1:
        raise DataError("masks have several channels; save them with one number per place, not as colours")
    values = mask.values
    whole = np.rint(values) if values.dtype.kind == "f" else values
    if whole is not values and not np.allclose(values, whole, atol=1e-3):
        raise DataError("masks have values that are no whole numbers; save the labels and not probabilities")
    if whole.min() < 0 or whole.max() > GREATEST:
        raise DataError(f"masks have values below 0 or above {GREATEST}; is an image among them?")
    return replace(mask, values=whole.astype(np.int64))


def refuse_another_place(one: Scan, other: Scan, what: str, path: Path) -> None:
    """Raise a DataError unless two scans lie on one grid. path: of the second."""
    if one.values.shape[1:] != other.values.shape[1:]:
        raise DataError(f"{what} have different sizes; export both on one grid", str(path))
    if one.values.ndim == 4 and not np.allclose(one.affine, other.affine, atol=SAME_PLACE):
        raise DataError(f"{what} lie in different places; export both on one grid", str(path))


class CaseReader:
    """Reads a case's files: here one for each channel, and one for the mask."""

    def scan(self, entry: Entry) -> Scan:
        """Return a case's image."""
        first, *others = [read_scan(path) for path in entry.images]
        for scan, path in zip(others, entry.images[1:], strict=True):
            refuse_another_place(first, scan, "channels of a case", path)
        return replace(first, values=np.concatenate([one.values for one in (first, *others)])) if others else first

    def mask(self, scan: Scan, path: Path) -> np.ndarray:
        """Return its mask's values on the image's grid, whole numbers [(D,) H, W]."""
        mask = mask_of(path)
        refuse_another_place(scan, mask, "an image and its mask", path)
        return mask.values[0]
