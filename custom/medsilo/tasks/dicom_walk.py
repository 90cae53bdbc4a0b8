"""DICOM files, walked through before a library reads them: GDCM takes memory for any length that an element claims."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from medsilo.core.errors import DataError

PREAMBLE, MAGIC = 128, b"DICM"
LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")  # 4 bytes of length
IMPLICIT, BIG = b"1.2.840.10008.1.2", b"1.2.840.10008.1.2.2"
SYNTAX, PIXELS, ITEM = (0x0002, 0x0010), (0x7FE0, 0x0010), 0xFFFE
DEFLATED = b"1.2.840.10008.1.2.1.99"  # a few megabytes may become any number when a library opens them
UNKNOWN = 0xFFFFFFFF  # a length that delimiters tell
MOST = 1_000_000  # elements


def is_dicom(path: Path) -> bool:
    """Return whether a file says of itself that it is DICOM."""
    with path.open("rb") as file:
        return file.read(PREAMBLE + 4)[PREAMBLE:] == MAGIC


def check_dicom(path: Path) -> None:
    """Refuse a file with an element that claims more bytes than the file has; nothing is read but tags and lengths."""
    try:
        tags_in(path.read_bytes())
    except ValueError as error:
        raise DataError(
            "an image can't be read: it is damaged or no image; copy or export it again", f"{path}: {error}"
        ) from error


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
            self.fragments = (tag == PIXELS and length == UNKNOWN) or (self.fragments and tag[0] == ITEM)
            self.place = begin if enters else begin + length
            yield tag

    def _head(self, tag: tuple[int, int]) -> tuple[bytes, int, int]:
        """An element's kind as far as it is told, the length of its value, and where that begins."""
        place = self.place
        if not self.explicit or tag[0] == ITEM:
            return b"", self._number(place + 4, 4), place + 8
        kind = self.data[place + 4 : place + 6]
        if kind in LONG:
            return kind, self._number(place + 8, 4), place + 12
        return kind, self._number(place + 6, 2), place + 8
