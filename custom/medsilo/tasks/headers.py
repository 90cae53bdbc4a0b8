"""Check image files before and after a library reads them. Reject headers that name other files or impossible sizes,
and files that lack some of their values.

In DICOM files, check every element, because the library GDCM allocates as much memory as an element claims to need.
"""

import math
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from medsilo.core.errors import DataError

PREAMBLE, MAGIC = 128, b"DICM"
# DICOM value representations (VR) whose length field has 4 bytes.
LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
IMPLICIT, BIG = b"1.2.840.10008.1.2", b"1.2.840.10008.1.2.2"
SYNTAX, PIXEL_DATA, ITEM = (0x0002, 0x0010), (0x7FE0, 0x0010), 0xFFFE
SEQUENCE_ENDS = (ITEM, 0xE0DD)
# transfer syntax of deflated DICOM files, which are rejected because a small file may decompress to any size
DEFLATED = b"1.2.840.10008.1.2.1.99"
UNKNOWN = 0xFFFFFFFF  # undefined length: a delimiter ends the element
MOST = 1_000_000  # limit on the number of DICOM elements in a file
CLOSED = "an image can't be read: this process's account may not; let it read the file"
DAMAGED = "an image can't be read: it is damaged or no image, or stored in an unusual way; copy or export it again"


def is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(PREAMBLE + 4)[PREAMBLE:] == MAGIC


def check_dicom(path: Path) -> None:
    """Raise DataError if an element of a DICOM file claims more bytes than the file contains, or if compressed pixel
    data have no end. Files in other formats are ignored.
    """
    if not is_dicom(path):
        return
    try:
        tags_in(path.read_bytes())
    except ValueError as error:
        raise DataError(DAMAGED, f"{path}: {error}") from error


def tags_in(data: bytes) -> set[tuple[int, int]]:
    """Return the tags of all DICOM elements, including nested elements. Raises ValueError if a DICOM element claims
    more bytes than the data contain, or if compressed pixel data have no end.
    """
    # search the transfer syntax in the whole file, because libraries disagree about where the meta elements end
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
        self.syntax = b""  # the transfer syntax that the meta elements state
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
            follows = self.fragments and tag[0] == ITEM and tag != SEQUENCE_ENDS
            self.fragments = follows or (tag == PIXEL_DATA and length == UNKNOWN)
            self.place = begin if enters else begin + length
            self._enter_unknown(tag, kind, length)
            yield tag
        if self.fragments:
            raise ValueError("the compressed pixel data have no end")  # GDCM would fill in copies of other frames

    def _enter_unknown(self, tag: tuple[int, int], kind: bytes, length: int) -> None:
        """Track the nesting within a sequence of VR UN (unknown), because its elements state no VR (DICOM PS3.5,
        6.2.2).
        """
        if self.unknown:
            self.unknown += (length == UNKNOWN and tag[0] != ITEM) - (tag == SEQUENCE_ENDS)
            self.explicit = not self.unknown
        elif self.explicit and self.order == "little" and kind == b"UN" and length == UNKNOWN and tag[0] > SYNTAX[0]:
            self.unknown, self.explicit = 1, False

    def _head(self, tag: tuple[int, int]) -> tuple[bytes, int, int]:
        """Return an element's VR (empty if implicit), the length of its value, and the position of its value."""
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
# plus a factor times the size of the file. The factors are below zlib's largest compression ratio, 1032, because only
# small masks come close to it.
BYTES, VALUES, PIXELS = (1 << 30, 100), (1 << 28, 256), (1 << 27, 4)
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # first bytes of TIFF files; a + marks the format BigTIFF
BMP_RUNS = (1, 2)  # BMP's codes for compressed pixels (RLE8, RLE4)
ORIENTATION, LAB = 274, 8  # tag of the orientation in EXIF and TIFF, and TIFF's code for CIELAB colours
META_LINE = re.compile(rb"[\t\x20-\x7e]*\r?")
META_DATA = re.compile(rb"ElementDataFile\s*[=:]\s*([^\s/\\]+)\s*")
META_AXES = re.compile(rb"NDims\s*[=:]\s*(\S*)")
META_STORED = re.compile(rb"^\s*(CompressedData|CompressedDataSize|HeaderSize)\s*[=:]\s*(\S+)", re.MULTILINE)
NRRD_DATA = re.compile(rb"(?:^|[\r\n])\s*data\s*file\s*:", re.IGNORECASE)
NRRD_END = re.compile(rb"\r?\n\r?\n")
NRRD_GZIP = re.compile(rb"^encoding:\s*gz", re.IGNORECASE | re.MULTILINE)
NRRD_FROM_END = re.compile(rb"^byte\s*skip:\s*-", re.IGNORECASE | re.MULTILINE)
GZIP = b"\x1f\x8b"
JPEG = b"\xff\xd8\xff"
# The next marker of a JPEG file; within pixel data, FF occurs only before 00 and D0 to D7
JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
JPEG_END = b"\xd9"
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
    """Return the file with the values of a MetaImage: the file itself, or, for an .mhd file, a file in the same
    folder.
    """
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
    beside = path.parent / name  # not a file if the header gives a list or a pattern of names
    if path.suffix != ".mhd" or not beside.is_file() or beside.resolve().parent != path.parent.resolve():
        raise DataError(ELSEWHERE, str(path))
    return beside


def file_of_nrrd(path: Path) -> Path:
    """Return the given NRRD file. Raises DataError if its header is incomplete or names other files."""
    head = _head(path)
    if NRRD_DATA.search(head):
        raise DataError(ELSEWHERE, str(path))
    if NRRD_END.search(head) is None:
        raise DataError("an image's header is incomplete; export it again", str(path))
    return path


def check_meta_values(path: Path, values: Any) -> None:
    """Raise DataError if SimpleITK read wrong values from a MetaImage.

    SimpleITK ignores errors of decompression. The values that it can't decompress are then uninitialised memory.
    """
    before, key, rest = _head(path).partition(b"ElementDataFile")
    stored, file = dict(META_STORED.findall(before)), file_of_meta(path)
    start = len(before + key) + rest.index(b"\n") + 1 if file == path else 0
    if stored.get(b"CompressedData", b"F")[:1] in b"Tt1":
        size = int(stored.get(b"CompressedDataSize", b"0"))
        _check_sum(values, file, start, start + size if size else file.stat().st_size)
    elif stored.get(b"HeaderSize", b"0").startswith(b"-"):
        _check_end(values, file, start)


def check_nrrd_values(path: Path, values: Any) -> None:
    """Raise DataError if SimpleITK read wrong values from an NRRD file, because SimpleITK ignores gzip's checksum."""
    head = _head(path)
    end = NRRD_END.search(head)
    start = end.end() if end else 0
    if NRRD_GZIP.search(head[:start]):
        _check_sum(values, path, start, path.stat().st_size)
    elif NRRD_FROM_END.search(head[:start]):
        _check_end(values, path, start)


def _check_sum(values: Any, path: Path, start: int, end: int) -> None:
    """Raise DataError if values do not match the checksum at the end of their compressed stream (zlib or gzip).

    Computing the checksum takes a tenth of the time that a second decompression would take.
    """
    import numpy as np

    with path.open("rb") as file:
        file.seek(start)
        gzip = file.read(2) == GZIP
        file.seek(end - 8)
        last = file.read(8)
    told = int.from_bytes(last[:4], "little") if gzip else int.from_bytes(last[4:], "big")
    sum_of = zlib.crc32 if gzip else zlib.adler32
    # the file may have another byte order, and an NRRD file may contain one channel after another
    orders = (values, values.transpose(-1, *range(values.ndim - 1)))
    arrays: Iterator[Any] = (
        np.ascontiguousarray(order.byteswap() if swap else order) for order in orders for swap in (False, True)
    )
    if all(sum_of(array) != told for array in arrays):
        raise DataError(DAMAGED, f"{path}: the values do not have the checksum in the file")


def _check_end(values: Any, path: Path, start: int) -> None:
    """For a file whose header locates the values by their distance from the end: raise DataError unless header and
    values fill the whole file. In a truncated file, SimpleITK would read shifted values.
    """
    if start + values.nbytes != path.stat().st_size:
        raise DataError(DAMAGED, f"{path}: the header does not give the offset of the values")


def check_jpeg(path: Path) -> None:
    """Raise DataError if a JPEG file is truncated, because SimpleITK replaces missing pixels by grey pixels."""
    with path.open("rb") as file:
        if file.read(len(JPEG)) != JPEG:
            return
        data = JPEG + file.read()
    place = 2
    while (marker := JPEG_MARKER.search(data, place)) and marker[1] != JPEG_END:
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    if marker is None:
        raise DataError(DAMAGED, f"{path}: the file has no end")


def check_bmp(path: Path) -> None:
    """Raise DataError if a BMP file is truncated or compressed.

    For missing pixels, SimpleITK returns uninitialised memory. If compressed pixels are damaged, SimpleITK accesses
    memory out of bounds.
    """
    with path.open("rb") as file:
        head = file.read(34)
    if not head.startswith(b"BM") or path.suffix.lower() != ".bmp":
        return
    if len(head) < 34:
        raise DataError(DAMAGED, f"{path}: the file is truncated")
    offset, kind = struct.unpack_from("<II", head, 10)
    if kind == 12:  # the header of OS/2 has 16-bit numbers, and such files are never compressed
        width, height, _, bits, packed = *struct.unpack_from("<HHHH", head, 18), 0
    else:
        width, height, _, bits, packed = struct.unpack_from("<iiHHI", head, 18)
    if packed in BMP_RUNS:
        raise DataError("BMP files are compressed; save them as PNG", str(path))
    check_size((width, abs(height)), 1, path)
    if offset + (width * bits + 31) // 32 * 4 * abs(height) > path.stat().st_size:
        raise DataError(DAMAGED, f"{path}: the file is truncated")


def check_png(path: Path) -> None:
    """Raise DataError if SimpleITK would read a PNG file wrongly.

    If a PNG file has a palette, SimpleITK converts the palette indices to colours, which destroys labels. Of several
    pictures in a file, SimpleITK reads only the first. It can't read grey PNG files with an alpha channel.
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

    The function rejects TIFF files with an impossible size, missing pages or CIELAB colours. It also rejects rotated or
    mirrored images, because SimpleITK ignores the orientation.
    """
    from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, PHOTOMETRIC_INTERPRETATION, ImageFileDirectory_v2

    with path.open("rb") as file:
        start = file.read(8)
        if not start.startswith(TIFF):
            return
        tags = ImageFileDirectory_v2(start + file.read(8) if b"+" in start[:4] else start)
        _check_pages(file, tags.next, big=b"+" in start[:4], order="little" if start.startswith(b"II") else "big")
        file.seek(tags.next)
        tags.load(file)
    check_size((tags[IMAGEWIDTH], tags[IMAGELENGTH]), 1, path)
    if tags.get(PHOTOMETRIC_INTERPRETATION) == LAB or tags.get(ORIENTATION, 1) != 1:
        raise DataError(
            "TIFF files have LAB colours or are stored rotated; save them upright, as grey or RGB", str(path)
        )


def _check_pages(file: BinaryIO, offset: int, big: bool, order: Literal["big", "little"]) -> None:
    """Raise DataError if a page of a TIFF file lies beyond the end of the file, because SimpleITK would skip it
    silently.
    """
    counts, entry, offsets = (8, 20, 8) if big else (2, 12, 4)
    seen = {0}
    while offset not in seen:
        seen.add(offset)
        file.seek(offset)
        file.seek(offset + counts + int.from_bytes(file.read(counts), order) * entry)
        following = file.read(offsets)
        if len(following) < offsets:
            raise DataError(DAMAGED, f"{file.name}: pages are missing")
        offset = int.from_bytes(following, order)


def is_turned(path: Path) -> bool:
    """Return True if a photograph's EXIF orientation rotates or mirrors it, because SimpleITK ignores the
    orientation.
    """
    from PIL.JpegImagePlugin import JpegImageFile

    # JpegImageFile reads no pixels, and raises an error for other formats
    with suppress(Exception), JpegImageFile(path) as image:
        return image.getexif().get(ORIENTATION, 1) != 1
    return False
