"""Read a DICOM series as a volume: sort its slices by position, and convert stored values to physical units."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.extend import DataError, Scan
from medsilo_dicom.header import PLAIN, Header, library, read_headers

UNEVEN = 1.1  # maximum ratio between the largest and the smallest distance between slices
ALONG = 1e-3  # maximum difference between two unit vectors that count as equal
SHEAR = 2e-3  # maximum sideways shift of a slice, in mm per mm along the stack; 0.002 is about a tenth of a degree
RLE = "1.2.840.10008.1.2.5"


@dataclass(frozen=True)
class ImageSeries:
    """The slices of a volume in order, and the volume's voxel grid. `affine` [4, 4] maps voxel indices (x, y, z) to
    millimetres in LPS coordinates.
    """

    slices: tuple[Header, ...]
    affine: np.ndarray

    @property
    def uid(self) -> str:
        return self.slices[0].series

    @property
    def frame_of_reference(self) -> str:
        """The UID of the series' coordinate system, or an empty text if de-identification removed this UID."""
        return self.slices[0].alike[2]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(header.path for header in self.slices))

    def refuse_elsewhere(self, frame: object, subject: str) -> None:
        """Raise DataError if a segmentation or contour file refers to another coordinate system than its series.
        `subject` is the word for the file in the error message.
        """
        if self.frame_of_reference and str(frame) != self.frame_of_reference:
            raise DataError(f"{subject} lie in another frame of reference than their series")

    def refuse_lacking(self, images: Iterable[Any], subject: str) -> None:
        """Raise DataError if a segmentation or contour file refers to a slice that the series lacks. `subject` is the
        word for the file in the error message.
        """
        there = {header.instance for header in self.slices}
        if any(str(image.ReferencedSOPInstanceUID) not in there for image in images):
            raise DataError(f"series lack slices that their {subject} to; copy them again")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self.slices), *self.slices[0].shape)


def make_series(headers: Sequence[Header]) -> ImageSeries:
    """Sort the slices of a series into a volume; raise DataError with the reason if the slices do not form one
    volume.
    """
    for header in headers:
        if header.wrong:
            raise DataError(header.wrong, private=str(header.path))
    if any(header.burned_in for header in headers):
        raise DataError("series are flagged to have annotations burned into their pixels; remove these annotations")
    if len(headers) < 2:
        raise DataError("series have only one slice; a volume needs more slices")
    _refuse_mixture(headers)
    return _stacked(headers)


def _refuse_mixture(headers: Sequence[Header]) -> None:
    for what, mixed in (
        ("sizes", len({header.shape for header in headers}) > 1),
        ("phases, echoes, kernels or patients", len({header.alike for header in headers}) > 1),
        ("orientations", np.ptp([header.orientation for header in headers], axis=0).max() > ALONG),
        ("pixel spacings", np.ptp([header.spacing for header in headers], axis=0).max() > ALONG),
    ):
        if mixed:
            raise DataError(f"series have slices of several {what}; export each volume as a series of its own")


def _stacked(headers: Sequence[Header]) -> ImageSeries:
    first = headers[0]
    along, down = np.array(first.orientation[:3]), np.array(first.orientation[3:])
    if max(abs(np.linalg.norm(along) - 1), abs(np.linalg.norm(down) - 1), abs(along @ down)) > ALONG:
        raise DataError("series have rows and columns that are not at right angles; export them again")
    along, down = along / np.linalg.norm(along), down / np.linalg.norm(down)
    normal = np.cross(along, down)
    order = sorted(headers, key=lambda one: (float(np.array(one.position) @ normal), one.instance, one.frame))
    places = np.array([header.position for header in order])
    heights = (places - places[0]) @ normal
    steps = np.diff(heights)
    _refuse_doubles(heights)
    if steps.max() > UNEVEN * steps.min():
        raise DataError("series have slices at uneven distances, so a slice may be missing; copy or export them again")
    drift = np.linalg.norm(places - places[0] - heights[:, None] * normal, axis=1).max()
    if drift > max(SHEAR * heights[-1], 0.01) or abs(first.tilt) > 0.1:
        raise DataError("series were taken with a tilted gantry, so that their slices are shifted; straighten them")
    affine = np.eye(4)
    rows, columns = first.spacing
    affine[:3, :3] = np.stack([along * columns, down * rows, normal * heights[-1] / len(steps)], axis=1)
    affine[:3, 3] = places[0]
    return ImageSeries(tuple(order), affine)


def _refuse_doubles(heights: np.ndarray) -> None:
    there = Counter(np.round(heights, 3).tolist()).values()
    if max(there) == 1:
        return
    if min(there) > 1:
        raise DataError(
            "series have several slices at each position: phases or time points; export each as a separate series"
        )
    raise DataError("series have a slice twice; remove the copies")


def read_again(files: Sequence[Path]) -> ImageSeries:
    """Read the headers of a series' files again; raise DataError if a file has been damaged since the data set was
    listed.
    """
    found = [read_headers(path) for path in files]
    headers = [header for own in found for header in own]
    if not all(found) or len({header.series for header in headers}) > 1:
        raise DataError("series have a damaged file; copy or export them again")
    return make_series(headers)


def values_of(series: ImageSeries) -> np.ndarray:
    values = np.empty(series.shape, np.float32)
    for path in series.files:
        own = {place: header for place, header in enumerate(series.slices) if header.path == path}
        try:
            stored, scaled = _stored(path, list(own.values()))
            for place, header in own.items():
                slope, intercept = (1.0, 0.0) if scaled else header.scale
                values[place] = stored[header.frame].astype(np.float64) * slope + intercept
        except DataError:
            raise
        except Exception as error:  # decoders can raise any error for damaged pixels
            damaged = "series have pixels that can't be read; copy or export them again"
            raise DataError(damaged, private=f"{path}: {error}") from error
    return values


def _stored(path: Path, frames: Sequence[Header]) -> tuple[np.ndarray, bool]:
    """Return the pixels of a DICOM file [frames, rows, columns], and True if the rescale slope and intercept have
    already been applied to the pixels.
    """
    elements = library().dcmread(BytesIO(path.read_bytes()))
    if str(elements.file_meta.TransferSyntaxUID) in (*PLAIN, RLE):
        return elements.pixel_array.reshape(-1, *frames[0].shape), False
    if len({header.scale for header in frames}) > 1:
        raise DataError(
            "series are compressed, and their frames have different slopes; export them without compression"
        )
    import SimpleITK

    # SimpleITK's GDCM reader decodes compressed pixels, and also applies the rescale slope and intercept.
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path), imageIO="GDCMImageIO")), True


def scan_of_series(series: ImageSeries) -> Scan:
    """Return a series as a Scan, the input type of tasks, with the voxels reordered to the standard orientation."""
    return replace(Scan.of(_image(values_of(series), series)), source=series)


def mask_as_scanned(mask: np.ndarray, series: ImageSeries) -> np.ndarray:
    """Reorient a mask on the voxel grid of a series in the same way as the values of the series' Scan."""
    return Scan.of(_image(mask.astype(np.float32), series)).values[0].astype(np.int64)


def _image(values: np.ndarray, series: ImageSeries) -> Any:
    import SimpleITK

    image = SimpleITK.GetImageFromArray(values)
    spacing = np.linalg.norm(series.affine[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(series.affine[:3, 3].tolist())
    image.SetDirection((series.affine[:3, :3] / spacing).ravel().tolist())
    return image
