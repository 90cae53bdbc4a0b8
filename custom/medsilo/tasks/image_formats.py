"""List the formats of image files that medsilo reads, and open files in these formats.

The module imports no image library at its top, because listing files needs only the suffixes.
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from medsilo.core.errors import DataError
from medsilo.tasks.headers import (
    DAMAGED,
    HEAD,
    check_bmp,
    check_dicom,
    check_jpeg,
    check_meta_values,
    check_nrrd_values,
    check_png,
    check_size,
    check_tiff,
    file_of_meta,
    file_of_nrrd,
    is_dicom,
)

PNG = b"\x89PNG\r\n\x1a\n"  # first bytes of PNG files


@dataclass(frozen=True)
class ImageFormat:
    """A format of image files.

    Files of a format with a function `read` are recognised by their suffix, and `read` reads them. SimpleITK reads all
    other files, and recognises their format by their content.
    """

    name: str  # the name in messages and in the documentation
    suffixes: tuple[str, ...]  # in lower case; empty if only the content shows the format
    volumes: bool  # True if files usually contain volumes, False if they usually contain flat images
    masks: tuple[str, ...] = ()  # suffixes that predicted masks keep; for other suffixes, masks are written as NIfTI
    reader: str = ""  # SimpleITK's reader of this format; "": SimpleITK must not open such files
    # Reads a file as a SimpleITK image. Must call check_size first if another library reads the values.
    read: Callable[[Path], Any] | None = None
    # Raises DataError for a file in this format that SimpleITK must not open. It also gets files in other formats,
    # because the format is not known yet, and ignores them.
    check: Callable[[Path], None] | None = None
    # Raises DataError for a file in this format that SimpleITK would read wrongly. It also gets files in other formats,
    # and ignores them.
    check_values: Callable[[Path], None] | None = None
    # Raises DataError if the values that SimpleITK read are not those in the file.
    check_result: Callable[[Path, Any], None] | None = None
    # Returns the file that contains the values of an image. Raises DataError if the header names a file elsewhere.
    file_of: Callable[[Path], Path] | None = None


def _read_nifti(path: Path) -> Any:
    """Read a NIfTI file.

    Raises an error if the file is truncated or damaged, contains NaN, or has a contradictory header. The library
    nibabel checks this, because SimpleITK silently replaces NaN and missing values by zeros.
    """
    import nibabel
    import numpy as np

    image: Any = nibabel.load(path)
    check_size(image.shape, image.get_data_dtype().itemsize, path)
    header = image.header
    places = [header.get_sform(), header.get_qform()] if header["sform_code"] > 0 < header["qform_code"] else []
    if len({nibabel.aff2axcodes(place) for place in places}) > 1:
        raise DataError(
            "an image's header gives two different positions (sform and qform); export it again from its source"
        )
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        # raises an error if the file is truncated
        values = np.asanyarray(type(image).from_stream(file).dataobj.get_unscaled())
        file.read(HEAD)  # makes gzip verify its checksum at the end of a compressed file
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        wrong = np.count_nonzero(~np.isfinite(values))
        raise DataError(f"an image has {wrong} values that are NaN or infinite", str(path))
    return open_reader(path).Execute()


# Only these readers of SimpleITK are used, because others (HDF5, Stimulate) open further files that a header names
FORMATS = (
    ImageFormat(
        "NIfTI", (".nii.gz", ".nii"), volumes=True, masks=(".nii.gz", ".nii"), reader="Nifti", read=_read_nifti
    ),
    ImageFormat(
        "MHA",
        (".mha", ".mhd"),
        volumes=True,
        masks=(".mha",),
        reader="Meta",
        check_result=check_meta_values,
        file_of=file_of_meta,
    ),
    ImageFormat(
        "NRRD",
        (".nrrd",),
        volumes=True,
        masks=(".nrrd",),
        reader="Nrrd",
        check_result=check_nrrd_values,
        file_of=file_of_nrrd,
    ),
    ImageFormat("DICOM", (), volumes=True, reader="GDCM", check=check_dicom),
    ImageFormat("PNG", (".png",), volumes=False, masks=(".png",), reader="PNG", check_values=check_png),
    ImageFormat("JPEG", (".jpg", ".jpeg"), volumes=False, reader="JPEG", check_values=check_jpeg),
    ImageFormat("TIFF", (".tif", ".tiff"), volumes=False, masks=(".tif", ".tiff"), reader="TIFF", check=check_tiff),
    ImageFormat("BMP", (".bmp",), volumes=False, reader="BMP", check=check_bmp),
)
SUFFIXES = tuple(suffix for one in FORMATS for suffix in one.suffixes)
READERS = {f"{one.reader}ImageIO": one for one in FORMATS if one.reader}


def read_image(path: Path) -> Any:
    """Return the image in a file as a SimpleITK image."""
    import SimpleITK

    for one in FORMATS:
        if one.check_values:
            one.check_values(path)
    readers = (one.read for one in FORMATS if path.name.lower().endswith(one.suffixes))
    if read := next(readers, None):
        return read(path)
    reader = open_reader(path)
    image = reader.Execute()
    if check_result := READERS[reader.GetImageIO()].check_result:
        check_result(path, SimpleITK.GetArrayViewFromImage(image))
    return image


def open_reader(path: Path) -> Any:
    """Return a SimpleITK reader for an image file. Raises DataError if the header names another file or an impossible
    size.
    """
    import SimpleITK

    for one in FORMATS:
        if one.check:
            one.check(path)
    kind = _kind_of(path)
    if kind not in READERS or (kind == "GDCMImageIO" and not is_dicom(path)):
        raise DataError(DAMAGED, str(path))
    file_of = READERS[kind].file_of
    values = file_of(path) if file_of else path
    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO(kind)
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    check_size(reader.GetSize(), _bytes_of(reader.GetPixelID(), reader.GetNumberOfComponents()), values)
    return reader


def _kind_of(path: Path) -> str:
    """Return the name of SimpleITK's reader for a file.

    PNG files are recognised here, because SimpleITK would try one reader after another. For a small photograph, this
    takes a fifth of the reading time.
    """
    import SimpleITK

    with path.open("rb") as file:
        if file.read(len(PNG)) == PNG:
            return "PNGImageIO"
    return str(SimpleITK.ImageFileReader.GetImageIOFromFileName(str(path)))


@cache
def _bytes_of(pixel: int, components: int) -> int:
    """Return the number of bytes of one pixel or voxel."""
    import SimpleITK

    return int(SimpleITK.GetArrayViewFromImage(SimpleITK.Image([1, 1], pixel, components)).nbytes)
