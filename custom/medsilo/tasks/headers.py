"""Check the headers of image files before a library reads the files, and reject headers that name other files or
impossible sizes.

In DICOM files, every element is checked, because the library GDCM allocates as much memory as an element claims.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from medsilo.core.errors import DataError

PREAMBLE, MAGIC = 128, b"DICM"
# DICOM value representations (VR) whose length field has 4 bytes.
LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
IMPLICIT, BIG = b"1.2.840.10008.1.2", b"1.2.840.10008.1.2.2"
SYNTAX, PIXEL_DATA, ITEM = (0x0002, 0x0010), (0x7FE0, 0x0010), 0xFFFE
SEQUENCE_ENDS = (ITEM, 0xE0DD)
# the DICOM transfer syntax of deflated files; a small deflated file may decompress to any size
DEFLATED = b"1.2.840.10008.1.2.1.99"
UNKNOWN = 0xFFFFFFFF  # undefined length, which means that a delimiter ends the element
MOST = 1_000_000  # limit on the number of DICOM elements in a file
CLOSED = "an image can't be read: this process's account may not; let it read the file"
DAMAGED = "an image can't be read: it is damaged or no image, or stored in an unusual way; copy or export it again"


def is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(PREAMBLE + 4)[PREAMBLE:] == MAGIC


def check_dicom(path: Path) -> None:
    """Parse only tags and lengths of a DICOM file, and raise DataError if an element claims more bytes than the file
    contains. Files in other formats are not checked.
    """
    if not is_dicom(path):
        return
    try:
        tags_in(path.read_bytes())
    except ValueError as error:
        raise DataError(DAMAGED, f"{path}: {error}") from error


def tags_in(data: bytes) -> set[tuple[int, int]]:
    """Return the tags of all DICOM elements, including nested elements. Raises ValueError if a DICOM element claims
    more bytes than the data contain.
    """
    # The UID is searched at every position, because libraries disagree about the position at which the meta elements
    # end.
    if DEFLATED in data:
        raise ValueError("deflated DICOM files are not supported")
    tags = set()
    for number, tag in enumerate(_Walk(data)):
        if number > MOST:
            raise ValueError("the file has too many elements")
        tags.add(tag)
    return tags


class _Walk:
    """Iterates over a DICOM file's elements, including elements in sequences."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, PREAMBLE + 4
        self.syntax = b""  # the file's DICOM transfer syntax, as the file's meta elements state it
        self.explicit, self.order = True, "little"
        self.fragments = False  # True within compressed pixel data, whose items contain no DICOM elements
        self.unknown = 0  # how deep the current element is nested in a sequence of VR UN; 0 outside these sequences

    def _number(self, at: int, size: int) -> int:
        order: Literal["big", "little"] = "big" if self.order == "big" else "little"
        return int.from_bytes(self.data[at : at + size], order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.place < len(self.data):
            if self.syntax and self._number(self.place, 2) != SYNTAX[0]:
                self.explicit, self.order = self.syntax != IMPLICIT, "big" if self.syntax == BIG else "little"
                self.syntax = b""
            tag = (self._number(self.place, 2), self._number(self.place + 2, 2))
            kind, length, begin = self._head(tag)
            if begin > len(self.data) or (length != UNKNOWN and begin + length > len(self.data)):
                raise ValueError(f"element {tag} claims {length} bytes")
            if tag == SYNTAX:
                self.syntax = self.data[begin : begin + length].rstrip(b"\0 ")
            enters = length == UNKNOWN or kind == b"SQ" or (tag[0] == ITEM and not self.fragments)
            self.fragments = (tag == PIXEL_DATA and length == UNKNOWN) or (self.fragments and tag[0] == ITEM)
            self.place = begin if enters else begin + length
            self._enter_unknown(tag, kind, length)
            yield tag

    def _enter_unknown(self, tag: tuple[int, int], kind: bytes, length: int) -> None:
        """Count how deep the current DICOM element is nested in a sequence of VR UN, where elements have no VR (DICOM
        PS3.5, 6.2.2).
        """
        if self.unknown:
            self.unknown += (length == UNKNOWN and tag[0] != ITEM) - (tag == SEQUENCE_ENDS)
            self.explicit = not self.unknown
        elif self.explicit and self.order == "little" and kind == b"UN" and length == UNKNOWN and tag[0] > SYNTAX[0]:
            self.unknown, self.explicit = 1, False

    def _head(self, tag: tuple[int, int]) -> tuple[bytes, int, int]:
        """Return an element's VR, which is empty if the VR is implicit, and the length and offset of the element's
        value.
        """
        place = self.place
        if not self.explicit or tag[0] == ITEM:
            return b"", self._number(place + 4, 4), place + 8
        kind = self.data[place + 4 : place + 6]
        if kind in LONG:
            return kind, self._number(place + 8, 4), place + 12
        return kind, self._number(place + 6, 2), place + 8


HEAD = 1 << 20  # largest number of bytes in a text header
LONGEST = 400  # largest number of characters in a line of a text header
# Limits on the bytes of an image, the values of a volume, and the pixels of a flat image. Each limit is a constant,
# plus a factor that is multiplied by the number of bytes in the file. All factors are below 1032, the largest
# compression ratio of zlib; only small masks come close to this ratio.
BYTES, VALUES, PIXELS = (1 << 30, 100), (1 << 28, 256), (1 << 27, 4)
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # first bytes of TIFF files; a + marks the format BigTIFF
ORIENTATION, LAB = 274, 8  # tag of the orientation in EXIF and TIFF, and value with which TIFF marks CIELAB colours
META_LINE = re.compile(rb"[\t\x20-\x7e]*\r?")
META_DATA = re.compile(rb"ElementDataFile\s*[=:]\s*([^\s/\\]+)\s*")
META_AXES = re.compile(rb"NDims\s*[=:]\s*(\S*)")
NRRD_DATA = re.compile(rb"(?:^|[\r\n])\s*data\s*file\s*:", re.IGNORECASE)
NRRD_END = re.compile(rb"\r?\n\r?\n")
ELSEWHERE = "an image's header names another file; save the image with its values in one file"


def check_size(shape: tuple[int, ...], value_bytes: int, path: Path) -> None:
    """Raise DataError if an image's header claims more values than its file can contain.

    Args:
        shape: the number of values along each axis of the image
        value_bytes: bytes of one value
        path: the image's file
    """
    values, size = math.prod(int(length) for length in shape), path.stat().st_size
    deep = sum(length > 1 for length in shape) > 2
    free, ratio = VALUES if deep else PIXELS
    many = values > free + ratio * size or values * value_bytes > BYTES[0] + BYTES[1] * size
    if min(shape, default=1) < 1 or many:
        raise DataError("an image's header claims more values than its file holds; export it again", str(path))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


def file_of_meta(path: Path) -> Path:
    """Return the file that contains the values of a MetaImage; an .mhd file may name a file in the same folder."""
    head = _head(path)
    before, key, rest = head.partition(b"ElementDataFile")
    lines = before.split(b"\n")
    clean = all(len(line) <= LONGEST and META_LINE.fullmatch(line) for line in lines)
    named = META_DATA.fullmatch(key + rest.partition(b"\n")[0][:LONGEST])
    if not clean or lines[-1] or named is None:
        raise DataError(ELSEWHERE if key else "an image's header is incomplete; export it again", str(path))
    # SimpleITK writes out of bounds if NDims is not 2, 3 or 4.
    if META_AXES.findall(before) not in ([b"2"], [b"3"], [b"4"]):
        raise DataError(DAMAGED, str(path))
    name = named[1].decode("ascii", "replace")
    if name.upper() == "LOCAL":
        return path
    beside = path.parent / name  # if the header gives a list or a pattern of names, this path is not a file
    if path.suffix != ".mhd" or not beside.is_file() or beside.resolve().parent != path.parent.resolve():
        raise DataError(ELSEWHERE, str(path))
    return beside


def file_of_nrrd(path: Path) -> Path:
    """Return an NRRD file itself. Raises DataError if the file's header names other files, or is incomplete."""
    head = _head(path)
    if NRRD_DATA.search(head):
        raise DataError(ELSEWHERE, str(path))
    if NRRD_END.search(head) is None:
        raise DataError("an image's header is incomplete; export it again", str(path))
    return path


def check_png(path: Path) -> None:
    """Raise DataError if SimpleITK would read a PNG file wrongly.

    If a PNG file has a palette, SimpleITK converts the palette indices to colours, which destroys labels. If a file
    contains several pictures, SimpleITK reads only the first picture. SimpleITK does not support grey PNG files with an
    alpha channel.
    """
    from PIL.PngImagePlugin import PngImageFile

    # PngImageFile reads no pixels when it opens a file
    with suppress(OSError, SyntaxError, ValueError), PngImageFile(path) as image:
        if image.mode == "P":
            raise DataError("PNG files have a palette; save them as grey or RGB", str(path))
        if image.mode == "LA":
            raise DataError("PNG files are grey with an alpha channel; save them as grey or RGB", str(path))
        if image.is_animated:
            raise DataError("PNG files have several pictures each; save one in each file", str(path))


def check_tiff(path: Path) -> None:
    """Raise DataError if SimpleITK would read a TIFF file wrongly, or would allocate too much memory for the file.

    A TIFF file is rejected if it has an impossible size or CIELAB colours, or an orientation that SimpleITK ignores:
    rotated or mirrored.
    """
    from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, PHOTOMETRIC_INTERPRETATION, ImageFileDirectory_v2

    with path.open("rb") as file:
        start = file.read(8)
        if not start.startswith(TIFF):
            return
        tags = ImageFileDirectory_v2(start + file.read(8) if b"+" in start[:4] else start)
        file.seek(tags.next)
        tags.load(file)
    check_size((tags[IMAGEWIDTH], tags[IMAGELENGTH]), 1, path)
    if tags.get(PHOTOMETRIC_INTERPRETATION) == LAB or tags.get(ORIENTATION, 1) != 1:
        raise DataError(
            "TIFF files have LAB colours or are stored rotated; save them upright, as grey or RGB", str(path)
        )


def is_turned(path: Path) -> bool:
    """Return True if the EXIF orientation of a photograph is rotated or mirrored, which SimpleITK ignores."""
    from PIL.JpegImagePlugin import JpegImageFile

    # JpegImageFile reads no pixels, and raises an error if the file is no JPEG.
    with suppress(Exception), JpegImageFile(path) as image:
        return image.getexif().get(ORIENTATION, 1) != 1
    return False
