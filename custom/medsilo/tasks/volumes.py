"""Volumes and masks as NIfTI files: one orientation for all, and image and mask must lie in the same place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import DataError
from medsilo.tasks.headers import check_size
from medsilo.tasks.resizing import resized
from medsilo.tasks.scans import ORIENTATION, read_scan

RAS_TO_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
SAME_PLACE = 1e-2  # in millimetres


@dataclass(frozen=True)
class Volume:
    """values: [D, H, W], slices from foot to head; affine: [4, 4] from voxel (x, y, z) to millimetres, LPS."""

    values: np.ndarray
    affine: np.ndarray

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Millimetres between voxels along x, y and z."""
        x, y, z = np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(x), float(y), float(z)


def write_volume(path: Path, volume: Volume, stored_as: str = ORIENTATION) -> None:
    """Writes a NIfTI file whose voxel axes run in the order and directions of `stored_as`, for example "RAS", "PIR"."""
    import nibabel
    from nibabel import orientations

    affine = RAS_TO_LPS @ volume.affine
    image = nibabel.Nifti1Image(volume.values.transpose(2, 1, 0), affine)
    turn = orientations.ornt_transform(
        orientations.axcodes2ornt(ORIENTATION), orientations.axcodes2ornt(tuple(stored_as))
    )
    image = image.as_reoriented(turn)
    image.set_sform(image.affine, code=1)
    image.set_qform(image.affine, code=1)
    nibabel.save(image, path)


def read_image(path: Path) -> Volume:
    """Reads an image with SimpleITK, float32, turned so that its axes come nearest to LPS."""
    scan = read_scan(path)
    if scan.values.ndim != 4 or len(scan.values) > 1:
        raise DataError("an image is no volume with one value per voxel; see this site's log for its name", str(path))
    return Volume(scan.values[0], scan.affine)


def slices_of(values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """The slices of a volume [C, D, H, W] as a network for `shape` = (C, size, size) reads them: [D, C, size, size]."""
    if values.ndim != 4:
        raise DataError("a flat image, where the task reads volumes")
    if len(values) != shape[0]:
        raise DataError(f"the image has {len(values)} channels, the task reads {shape[0]}")
    return resized(torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))), shape[1:])


def labels_of_slices(output: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The label of each place of a volume [D, H, W], from a network's output for its slices."""
    return resized(output, grid[1:]).argmax(1)


def slices_in_monai(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """read_scan's turn and slices_of as MONAI's transforms: rows run to the back (P), columns to the left (L)."""
    return [
        {"_target_": "Orientationd", "keys": "image", "axcodes": "PLS", "labels": None},
        {"_target_": "Resized", "keys": "image", "spatial_size": [*shape[1:], -1], "mode": "trilinear"},
    ]


def read_mask(path: Path) -> Volume:
    """Reads a mask, int64, turned so that its axes come nearest to LPS: NIfTI with nibabel, others with SimpleITK."""
    import nibabel
    from nibabel import orientations

    if not path.name.lower().endswith((".nii", ".nii.gz")):
        other = read_image(path)
        return Volume(other.values.round().astype(np.int64), other.affine)
    try:
        mask: Any = nibabel.load(path)
        check_size(mask.shape, mask.get_data_dtype().itemsize, path)
        values, own = np.asanyarray(mask.dataobj), orientations.io_orientation(mask.affine)
        turn = orientations.ornt_transform(own, orientations.axcodes2ornt(ORIENTATION))
        affine = RAS_TO_LPS @ mask.affine @ orientations.inv_ornt_aff(turn, mask.shape)
        values = orientations.apply_orientation(values, turn)
        return Volume(np.ascontiguousarray(values.transpose(2, 1, 0)).astype(np.int64), affine)
    except DataError:
        raise
    except Exception as error:  # nibabel raises anything over damaged files
        raise DataError("a mask is no readable NIfTI file; see this site's log for its name", str(error)) from error


def read_pair(image_path: Path, mask_path: Path) -> tuple[Volume, Volume]:
    """An image and its mask, which must have the same shape and lie in the same place."""
    image, mask = read_image(image_path), read_mask(mask_path)
    if image.values.shape != mask.values.shape:
        shapes = f"{image.values.shape} and {mask.values.shape} voxels"
        raise DataError(f"an image and its mask have {shapes}; export both from one series", str(image_path))
    if not np.allclose(image.affine, mask.affine, atol=SAME_PLACE):
        raise DataError("an image and its mask lie in different places; export both from one series", str(image_path))
    return image, mask
