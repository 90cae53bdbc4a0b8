"""The headers of image files, checked before a library follows them: the files they name, the size they claim.

DICOM files are walked through: GDCM takes memory for any length that an element claims.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from medsilo.core.errors import DataError

PREAMBLE, MAGIC = 128, b"DICM"
LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")  # 4 bytes of length
IMPLICIT, BIG = b"1.2.840.10008.1.2", b"1.2.840.10008.1.2.2"
SYNTAX, PIXEL_DATA, ITEM = (0x0002, 0x0010), (0x7FE0, 0x0010), 0xFFFE
SEQUENCE_ENDS = (ITEM, 0xE0DD)
DEFLATED = b"1.2.840.10008.1.2.1.99"  # a few megabytes may become any number when a library opens them
UNKNOWN = 0xFFFFFFFF  # a length that delimiters tell
MOST = 1_000_000  # elements
CLOSED = "an image can't be read: this process's account may not; let it read the file"
DAMAGED = "an image can't be read: it is damaged or no image, or stored in an unusual way; copy or export it again"


def is_dicom(path: Path) -> bool:
    """Return whether a file says of itself that it is DICOM."""
    with path.open("rb") as file:
        return file.read(PREAMBLE + 4)[PREAMBLE:] == MAGIC


def check_dicom(path: Path) -> None:
    """Refuse a file with an element that claims more bytes than the file has; nothing is read but tags and lengths."""
    try:
        tags_in(path.read_bytes())
    except ValueError as error:
        raise DataError(DAMAGED, f"{path}: {error}") from error


def tags_in(data: bytes) -> set[tuple[int, int]]:
    """Return the tags of a file's elements at any depth; raise ValueError where one claims more than there is."""
    if DEFLATED in data:  # wherever: libraries do not agree on where the meta elements end
        raise ValueError("it is deflated")
    tags = set()
    for number, tag in enumerate(_Walk(data)):
        if number > MOST:
            raise ValueError("it has too many elements")
        tags.add(tag)
    return tags


class _Walk:
    """Goes from element to element, into sequences and their items."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, PREAMBLE + 4
        self.syntax = b""  # how the data set is written, once the meta elements before it have said so
        self.explicit, self.order = True, "little"
        self.fragments = False  # among compressed pixels, whose items hold no elements
        self.unknown = 0  # how many sequences deep in one of unknown kind (UN), where no element tells its kind

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
        """Follow a sequence of unknown kind to its end: what it holds is written without kinds (PS3.5, 6.2.2)."""
        if self.unknown:
            self.unknown += (length == UNKNOWN and tag[0] != ITEM) - (tag == SEQUENCE_ENDS)
            self.explicit = not self.unknown
        elif self.explicit and self.order == "little" and kind == b"UN" and length == UNKNOWN and tag[0] > SYNTAX[0]:
            self.unknown, self.explicit = 1, False

    def _head(self, tag: tuple[int, int]) -> tuple[bytes, int, int]:
        """An element's kind as far as it is told, the length of its value, and where that begins."""
        place = self.place
        if not self.explicit or tag[0] == ITEM:
            return b"", self._number(place + 4, 4), place + 8
        kind = self.data[place + 4 : place + 6]
        if kind in LONG:
            return kind, self._number(place + 8, 4), place + 12
        return kind, self._number(place + 6, 2), place + 8


# SimpleITK's for the kinds that the docs promise. Others follow names, too (HDF5, Stimulate).
READERS = ("BMP", "GDCM", "JPEG", "Meta", "Nifti", "Nrrd", "PNG", "TIFF")
HEAD = 1 << 20  # bytes that a text header may have
LONGEST = 400  # letters of a line of it
# The bytes, the values of a volume and the values of a picture that any image may have, and so many more for each byte
# of its file. zlib reaches 1032: masks come near it where they are small, and no mask of a gigabyte lies in a megabyte.
BYTES, VALUES, PIXELS = (1 << 30, 100), (1 << 28, 256), (1 << 27, 4)
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # how such a file begins; with + places in it have 64 bits
ORIENTATION, LAB = 274, 8  # EXIF's and TIFF's tag, and how colours may be stored
META_LINE = re.compile(rb"[\t\x20-\x7e]*\r?")
META_DATA = re.compile(rb"ElementDataFile\s*[=:]\s*([^\s/\\]+)\s*")
META_AXES = re.compile(rb"NDims\s*[=:]\s*(\S*)")
NRRD_DATA = re.compile(rb"(?:^|[\r\n])\s*data\s*file\s*:", re.IGNORECASE)
NRRD_END = re.compile(rb"\r?\n\r?\n")
ELSEWHERE = "an image's header names another file; save the image with its values in one file"


def open_reader(path: Path) -> Any:
    """Return SimpleITK's reader of a file whose header was read and holds nothing that must not be followed."""
    import SimpleITK

    dicom = is_dicom(path)
    if dicom:
        check_dicom(path)
    _check_tiff(path)
    kind = SimpleITK.ImageFileReader.GetImageIOFromFileName(str(path))
    if kind.removesuffix("ImageIO") not in READERS or (kind == "GDCMImageIO" and not dicom):
        raise DataError(DAMAGED, str(path))
    values = path
    if kind == "MetaImageIO":
        values = _file_of_meta(path)
    if kind == "NrrdImageIO":
        _check_nrrd(path)
    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO(kind)
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    one = SimpleITK.Image([1, 1], reader.GetPixelID(), reader.GetNumberOfComponents())
    check_size(reader.GetSize(), SimpleITK.GetArrayViewFromImage(one).nbytes, values)
    return reader


def check_size(shape: tuple[int, ...], value_bytes: int, path: Path) -> None:
    """Refuse an image whose header claims more values than its file can hold, before memory is taken for them."""
    values, size = math.prod(int(length) for length in shape), path.stat().st_size
    deep = sum(length > 1 for length in shape) > 2
    free, ratio = VALUES if deep else PIXELS
    many = values > free + ratio * size or values * value_bytes > BYTES[0] + BYTES[1] * size
    if min(shape, default=1) < 1 or many:
        raise DataError("an image's header claims more values than its file holds; export it again", str(path))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


def _file_of_meta(path: Path) -> Path:
    """Return where the values are: inside the file, or for .mhd in a plain file of the same folder."""
    head = _head(path)
    before, key, rest = head.partition(b"ElementDataFile")
    lines = before.split(b"\n")
    clean = all(len(line) <= LONGEST and META_LINE.fullmatch(line) for line in lines)
    named = META_DATA.fullmatch(key + rest.partition(b"\n")[0][:LONGEST])
    if not clean or lines[-1] or named is None:
        raise DataError(ELSEWHERE if key else "an image has no whole header; export it again", str(path))
    if META_AXES.findall(before) not in ([b"2"], [b"3"], [b"4"]):  # of others the library writes beyond its memory
        raise DataError(DAMAGED, str(path))
    name = named[1].decode("ascii", "replace")
    if name.upper() == "LOCAL":
        return path
    beside = path.parent / name  # a list or a pattern of names is no file
    if path.suffix != ".mhd" or not beside.is_file() or beside.resolve().parent != path.parent.resolve():
        raise DataError(ELSEWHERE, str(path))
    return beside


def _check_nrrd(path: Path) -> None:
    """Refuse a header that names files; it ends with an empty line, and the values follow."""
    head = _head(path)
    if NRRD_DATA.search(head):
        raise DataError(ELSEWHERE, str(path))
    if NRRD_END.search(head) is None:
        raise DataError("an image has no whole header; export it again", str(path))


def _check_tiff(path: Path) -> None:
    """Refuse a picture of absurd height before the library makes a table of its lines; and LAB colours and pictures
    that are stored turned, which it reads otherwise than programs show them."""
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
            "TIFF files have LAB colours or are stored turned; save them upright, as grey or RGB", str(path)
        )


def is_turned(path: Path) -> bool:
    """Return whether programs show a photograph turned by its EXIF orientation, which the library does not read."""
    from PIL.JpegImagePlugin import JpegImageFile

    with suppress(Exception), JpegImageFile(path) as image:  # whose pixels are not read; other bytes are no JPEG
        return image.getexif().get(ORIENTATION, 1) != 1
    return False
