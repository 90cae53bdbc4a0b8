"""The outline of a message as FOBS packs it: how much is in it, without building any of it.

A message is one body (msgpack) and sections beside it for large texts and for references to tensors. A few bytes of a
body can become a hundred times as many in memory, so values are counted where they lie.
"""

import json
from collections.abc import Sequence

from nvflare.fuel.utils.buffer_list import BufferList
from nvflare.fuel.utils.fobs import dots, lobs

from medsilo.core.errors import Refused
from medsilo.federation.bounds import Bounds

DEEPEST = 100  # levels of a body: FOBS adds two around each object
DOWNLOADS = (dots.TENSOR_DOWNLOAD, dots.NUMPY_DOWNLOAD)  # sections that say where tensors are fetched from
CUT = "its answer can't be read: it was cut short"
LONGEST_REFERENCE = 10_000  # bytes of such a section
# Bytes behind the code of a value without parts; of a text or bytes, bytes of its length; of a list or map, likewise.
FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
TEXTS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
EXTENDED = {0xC7: 1, 0xC8: 2, 0xC9: 4}
LISTS, MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


def check_outline(blob: Sequence[bytes], most: Bounds, origin: str) -> None:
    """Raise Refused unless a message is whole, of allowed parts, and no larger than it may be.

    origin: whose message it is; tensors are fetched from there only.
    """
    buffers, place = BufferList(list(blob)), 0
    end = buffers.get_size()
    body: bytes | None = None
    references: list[int] = []
    while place < end:
        marker, dot, size = lobs.HEADER_STRUCT.unpack(_read(buffers, place, lobs.HEADER_LEN, end))
        content = _read(buffers, place + lobs.HEADER_LEN, size, end)
        place += lobs.HEADER_LEN + size
        if body is None:
            if marker != lobs.MARKER_MAIN:
                raise Refused("its answer can't be read: it does not begin with a body")
            body = content
        elif marker not in (lobs.MARKER_DATUM_TEXT, lobs.MARKER_DATUM_BLOB):
            raise Refused("its answer has a section that is neither text nor bytes")
        elif dot:
            _check_reference(dot, content[lobs.DATUM_ID_LEN :], origin, references)
    check_body(body or b"", most.values)


def _read(buffers: BufferList, start: int, size: int, end: int) -> bytes:
    if start + size > end:
        raise Refused(CUT)
    return buffers.read_bytes(start, start + size)


def _check_reference(dot: int, content: bytes, origin: str, seen: list[int]) -> None:
    """Raise Refused unless this says, once for each kind, that its sender holds tensors ready."""
    if dot not in DOWNLOADS or dot in seen:
        raise Refused("its answer refers to data in a way that is not allowed")
    seen.append(dot)
    try:
        place = json.loads(content) if len(content) <= LONGEST_REFERENCE else None
    except (ValueError, RecursionError):
        place = None
    if not isinstance(place, dict) or place.get("fqcn") != origin:
        raise Refused("its answer refers to data that are not its own")


def check_body(body: bytes, most: int) -> None:
    """Raise Refused unless these bytes are one msgpack value of at most so many values in all, not nested too deep."""
    left = [1]  # values to come, by level
    place = seen = 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        if place >= len(body):
            raise Refused(CUT)
        left[-1] -= 1
        parts, place = _step(body, place)
        seen += 1
        if seen + parts > most:  # what a list announces counts at once: it takes memory when its length is known
            raise Refused(f"its answer has more than {most} values")
        left.append(parts)
        if len(left) > DEEPEST:
            raise Refused(f"its answer is nested more than {DEEPEST} deep")
    if place != len(body):
        raise Refused(CUT if place > len(body) else "its answer can't be read: its body is not one value")


def _step(body: bytes, place: int) -> tuple[int, int]:
    """Return how many values the one at this place announces, and where the next one begins."""
    code, place = body[place], place + 1
    if code < 0x80 or code >= 0xE0:  # small numbers
        return 0, place
    if code < 0x90:
        return 2 * (code & 0x0F), place
    if code < 0xA0:
        return code & 0x0F, place
    if code < 0xC0:
        return 0, place + (code & 0x1F)
    if code in FIXED:
        return 0, place + FIXED[code]
    for table, parts in ((TEXTS, 0), (EXTENDED, 0), (LISTS, 1), (MAPS, 2)):
        if code in table:
            width = table[code]
            number = int.from_bytes(body[place : place + width], "big")
            skipped = 0 if parts else number + (table is EXTENDED)
            return parts * number, place + width + skipped
    raise Refused("its answer can't be read: it holds what is no value")
