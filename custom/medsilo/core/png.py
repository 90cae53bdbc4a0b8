"""PNG files from arrays, with nothing but the standard library and numpy."""

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, COLOUR = 0, 2


def png(pixels: "np.ndarray") -> bytes:
    """uint8 pixels, [H, W] grey or [H, W, 3] RGB, as the bytes of a PNG file."""
    import numpy as np  # here, because reports only look at signatures

    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise ValueError(f"pixels are {pixels.dtype} {pixels.shape}: give uint8 [H, W] or [H, W, 3]")
    height, width = pixels.shape[:2]
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)  # each row begins with its filter, 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if pixels.ndim == 2 else COLOUR, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
