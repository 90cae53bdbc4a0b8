"""Read image files as arrays with SimpleITK, and map predicted labels back to the grid of an image file."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import R_OK, access
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from medsilo.core.errors import DataError
from medsilo.tasks.headers import CLOSED, DAMAGED, check_dicom, check_size, is_dicom, tags_in
from medsilo.tasks.image_formats import open_reader, read_image

MOST_VOLUMES = 32  # limit on the number of volumes along a fourth axis
SAME_PLACE = 1e-2  # positions count as equal up to this difference in millimetres
GREATEST = 65_535  # largest value that is allowed in a mask
# As in DICOM and SimpleITK, x increases towards the patient's left, y towards the back, and z towards the head.
ORIENTATION = "LPS"


@dataclass(frozen=True)
class Scan:
    """An image that was read from a file. The array `values` is a volume [C, D, H, W] in float32, or a flat image [C,
    H, W] in the file's data type.

    The axes of a volume are permuted and flipped until they are as close as possible to LPS. The first slice is
    therefore the one nearest to the feet. The matrix `affine` [4, 4] maps the voxel (x, y, z) to millimetres in LPS.

    Code that opens image files with another library must first check them with `header_of`, `check_size` and
    `dicom_tags`.

    >>> import numpy as np
    >>> Scan(np.zeros((1, 8, 16, 16), np.float32), np.eye(4), (1.0, 1.0, 2.0), header=None).values.shape
    (1, 8, 16, 16)
    """

    values: np.ndarray
    affine: np.ndarray
    spacing: tuple[float, ...]  # millimetres between neighbouring voxels along x, y (and z)
    header: Any = field(repr=False)  # the SimpleITK image before axes are permuted and flipped
    # permutation of the file's axes, and whether each axis was flipped
    turn: tuple[tuple[int, ...], tuple[bool, ...]] = ((), ())
    source: Any = field(default=None, repr=False)  # data that a task's reader of images attaches

    header_of = staticmethod(open_reader)
    check_size = staticmethod(check_size)
    is_dicom = staticmethod(is_dicom)
    dicom_tags = staticmethod(tags_in)

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.of(_image_in(path))
        except DataError:
            raise
        except Exception as error:  # damaged files can make image readers raise any exception
            closed = path.exists() and not access(path, R_OK, effective_ids=True)
            raise DataError(CLOSED if closed else DAMAGED, str(error).strip()) from error

    @classmethod
    def of_channels(cls, paths: Sequence[Path]) -> Self:
        first, *others = map(cls.read, paths)
        for scan, path in zip(others, paths[1:], strict=True):
            first._refuse_another_place(scan, "channels of a case", path)
        return replace(first, values=np.concatenate([one.values for one in (first, *others)])) if others else first

    @classmethod
    def of_mask(cls, path: Path) -> Self:
        try:
            mask = cls.read(path)
        except DataError as error:
            raise DataError(str(error).replace("an image", "a mask"), error.private) from error
        if len(mask.values) != 1:
            raise DataError("masks have several channels; save them with one number per pixel or voxel, not as colours")
        values = mask.values
        whole = np.rint(values) if values.dtype.kind == "f" else values
        if whole is not values and not np.allclose(values, whole, atol=1e-3):
            raise DataError("masks have values that are not whole numbers; save labels, not probabilities")
        if whole.min() < 0 or whole.max() > GREATEST:
            raise DataError(f"masks have values below 0 or above {GREATEST}; is one of them an image?")
        return replace(mask, values=whole.astype(np.int64))

    @classmethod
    def of(cls, image: Any) -> Self:
        import SimpleITK

        axes, channels = image.GetDimension(), image.GetNumberOfComponentsPerPixel()
        header, turn = image, ((), ())
        if axes == 3:
            image = SimpleITK.Cast(image, SimpleITK.sitkVectorFloat32 if channels > 1 else SimpleITK.sitkFloat32)
            orient = SimpleITK.DICOMOrientImageFilter()
            orient.SetDesiredCoordinateOrientation(ORIENTATION)
            image = orient.Execute(image)
            turn = (orient.GetPermuteOrder(), orient.GetFlipAxes())
        values = SimpleITK.GetArrayFromImage(image)
        values = np.moveaxis(values, -1, 0) if channels > 1 else values[None]
        values = _without_opaque_alpha(values) if axes == 2 else values
        affine = np.eye(4)
        affine[:axes, :axes] = np.array(image.GetDirection()).reshape(axes, axes) * np.array(image.GetSpacing())
        affine[:axes, 3] = image.GetOrigin()
        return cls(values, affine, image.GetSpacing(), header, turn)

    def mask(self, path: Path) -> np.ndarray:
        """Read this image's mask as integers [(D,) H, W]. Raises DataError if both have different grids."""
        mask = self.of_mask(path)
        self._refuse_another_place(mask, "an image and its mask", path)
        return mask.values[0]

    def _refuse_another_place(self, other: "Scan", subject: str, path: Path) -> None:
        """Raise DataError unless this image and the given image have the same grid."""
        if self.values.shape[1:] != other.values.shape[1:]:
            raise DataError(f"{subject} have different sizes; export both on one grid", str(path))
        if self.values.ndim == 4 and not np.allclose(self.affine, other.affine, atol=SAME_PLACE):
            raise DataError(f"{subject} lie in different places; export both on one grid", str(path))

    @staticmethod
    def slices_of(values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        """Resize the slices of a volume, and return them as inputs [D, *shape] of a network.

        Args:
            values: the volume, [C, D, H, W]
            shape: the shape of an input, [C, H, W]
        """
        if values.ndim != 4:
            raise DataError("the image is flat, but the task reads volumes")
        if len(values) != shape[0]:
            raise DataError(f"the image has {len(values)} channels, but the task reads {shape[0]}")
        return resized(torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))), shape[1:])

    def on_own_grid(self, labels: np.ndarray) -> Any:
        """Map labels [(D,) H, W] on this scan's grid back to the grid of the image file, as a SimpleITK image."""
        import SimpleITK

        order, flips = self.turn
        axes = len(order)
        labels = np.flip(labels, tuple(axes - 1 - axis for axis in range(axes) if flips[axis]))
        if order:
            back = np.argsort(order)
            labels = labels.transpose([axes - 1 - back[axes - 1 - axis] for axis in range(axes)])
        kind = np.uint8 if labels.max(initial=0) < 256 else np.uint16
        image = SimpleITK.GetImageFromArray(np.ascontiguousarray(labels, kind))
        image.SetSpacing(self.header.GetSpacing())
        image.SetOrigin(self.header.GetOrigin())
        image.SetDirection(self.header.GetDirection())
        return image


def _image_in(path: Path) -> Any:
    image = _read_series(path) if path.is_dir() else read_image(path)
    if image.GetDimension() == 4:
        image = _volumes_as_channels(image)
    if image.GetDimension() not in (2, 3):
        raise DataError(f"an image has {image.GetDimension()} axes; give volumes or flat images", str(path))
    return image


def _volumes_as_channels(image: Any) -> Any:
    """Convert volumes along a fourth axis to channels, because some data sets store several MRI sequences along this
    axis.
    """
    import SimpleITK

    number = image.GetSize()[3]
    if number > MOST_VOLUMES:
        raise DataError(f"an image has {number} volumes along its fourth axis; save one of them")
    volumes = [image[:, :, :, place] for place in range(number)]
    return SimpleITK.Compose(volumes) if number > 1 else volumes[0]


def _without_opaque_alpha(values: np.ndarray) -> np.ndarray:
    alpha = values[-1]
    opaque = len(values) == 4 and alpha.dtype.kind == "u" and bool((alpha == np.iinfo(alpha.dtype).max).all())
    return values[:-1] if opaque else values


def _read_series(folder: Path) -> Any:
    import SimpleITK

    reader = SimpleITK.ImageSeriesReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileNames(series_of(folder))
    return reader.Execute()


def series_of(folder: Path) -> list[str]:
    """Return the files of the DICOM series in a folder, in the order of slices. Raises DataError unless the folder
    contains exactly one series.
    """
    import SimpleITK

    for path in sorted(folder.iterdir()):
        if path.is_file():
            check_dicom(path)
    series = SimpleITK.ImageSeriesReader.GetGDCMSeriesIDs(str(folder))
    if len(series) != 1:
        raise DataError(f"a folder has {len(series)} DICOM series; give one folder per series", str(folder))
    files = list(SimpleITK.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder), series[0]))
    _refuse_gaps(files)
    return files


def _refuse_gaps(files: list[str]) -> None:
    """Raise DataError if neighbouring slices have different distances, because SimpleITK assumes equal distances."""
    import SimpleITK

    places = []
    for file in files:
        reader = SimpleITK.ImageFileReader()
        reader.SetImageIO("GDCMImageIO")
        reader.SetFileName(file)
        reader.ReadImageInformation()
        places.append(reader.GetOrigin())
    steps = np.linalg.norm(np.diff(np.array(places), axis=0), axis=1)
    if len(steps) and steps.max() > 1.1 * steps.min():
        raise DataError(
            f"a DICOM series has slices {steps.min():.3g} to {steps.max():.3g} mm apart; is a slice missing, or there "
            f"twice?"
        )


# ---------------------------------------------------------------------------------------------------- grids
def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Resize images [B, C, *grid] by bilinear or trilinear interpolation, without smoothing."""
    if tuple(images.shape[2:]) == tuple(size):
        return images
    mode = "trilinear" if len(size) == 3 else "bilinear"
    return functional.interpolate(images, tuple(size), mode=mode, align_corners=False)


def resized_to_nearest(labels: Tensor, size: Sequence[int]) -> Tensor:
    same = tuple(labels.shape[2:]) == tuple(size)
    return labels if same else functional.interpolate(labels, tuple(size), mode="nearest-exact")
