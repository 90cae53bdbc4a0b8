"""A tensor as its difference to another of the same form: fewer bytes, and the same bits.

The bits of both are taken for whole numbers and subtracted. What is left is small in most places, of either sign: its
sign goes into the lowest bit, and the first bytes of all numbers stand together, then the second ones, so that the
bytes that are 0 or few lie side by side. Deflate packs them; it looks for runs only, which is twice as fast here as
looking for what occurred before, and packs no less.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.spill import Spill, bytes_of
from medsilo.core.tensors import Groups

BLOCK = 1 << 18  # numbers that are worked at together
PIECE = 1 << 18  # packed bytes that are looked at together
RAW, MOST_MEMORY = -15, 9  # deflate without a frame of its own: marks say what is right
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Numbers = NDArray[np.unsignedinteger]


def pack(base: Tensor, tensor: Tensor) -> Iterator[bytes]:
    """Return the packed difference of two tensors of one form, piece by piece."""
    stream = zlib.compressobj(1, zlib.DEFLATED, RAW, MOST_MEMORY, zlib.Z_RLE)
    for before, after in zip(_blocks(base), _blocks(tensor), strict=True):
        for plane in _planes(_unsigned(after - before)):
            yield stream.compress(plane)
            yield stream.flush(zlib.Z_BLOCK)  # each plane has its own frequencies
    yield stream.flush()


def unpack(base: Tensor, packed: Any) -> Iterator[Tensor]:
    """Return the bytes of the tensor that a difference makes of another, block by block.

    Raises Refused, at the latest after the last block, unless it makes just as many: no more is ever unpacked.
    """
    stream = _Inflating(packed)
    for before in _blocks(base):
        planes = np.frombuffer(stream.take(before.nbytes), np.uint8).reshape(before.itemsize, -1)
        left = np.ascontiguousarray(planes.T).view(before.dtype).reshape(-1)
        yield torch.from_numpy((before + _signed(left)).view(np.uint8))
    stream.end()


def _blocks(tensor: Tensor) -> Iterator[Numbers]:
    """Return a tensor's numbers as whole ones; those of complex numbers are two."""
    width = 4 if tensor.is_complex() else tensor.element_size()
    numbers = np.frombuffer(bytes_of(tensor), WIDTHS[width])
    for start in range(0, len(numbers), BLOCK):
        yield numbers[start : start + BLOCK]


def _unsigned(left: Numbers) -> Numbers:
    """Return 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (left << 1) ^ np.negative(left >> (8 * left.itemsize - 1))


def _signed(left: Numbers) -> Numbers:
    return (left >> 1) ^ np.negative(left & 1)


def _planes(numbers: Numbers) -> Iterator[bytes]:
    for plane in numbers.view(np.uint8).reshape(-1, numbers.itemsize).T:
        yield plane.tobytes()


class _Inflating:
    """Packed bytes that nobody vouches for, unpacked as far as is asked and no further."""

    def __init__(self, packed: Any) -> None:
        plain_bytes = isinstance(packed, Tensor) and packed.layout is torch.strided and packed.dtype is torch.uint8
        if not plain_bytes or packed.dim() != 1 or not packed.is_contiguous():
            raise Refused("it is none")
        self.packed, self.place = bytes_of(packed), 0
        self.stream = zlib.decompressobj(RAW)

    def take(self, size: int) -> bytearray:
        """Return so many bytes; raises Refused where there are fewer."""
        found = bytearray()
        while len(found) < size:
            more = self._some(size - len(found))
            if not more and self._is_over:
                raise Refused("it makes fewer bytes than the tensor has")
            found += more
        return found

    def end(self) -> None:
        """Raise Refused unless nothing is left."""
        while not self.stream.eof:
            if self._some(1):
                raise Refused("it makes more bytes than the tensor has")
            if self._is_over and not self.stream.eof:
                raise Refused("it was cut short")
        if self.stream.unused_data or self.place < len(self.packed):
            raise Refused("something stands behind it")

    @property
    def _is_over(self) -> bool:
        """Return whether nothing is left that could be looked at."""
        return self.stream.eof or not (self.stream.unconsumed_tail or self.place < len(self.packed))

    def _some(self, most: int) -> bytes:
        """Return up to so many bytes; none where more has to be looked at first, or nothing is left."""
        given: bytes | memoryview = self.stream.unconsumed_tail
        if not given:
            given = self.packed[self.place : self.place + PIECE]
            self.place += len(given)
        try:
            return self.stream.decompress(given, most)
        except zlib.error as error:
            raise Refused("it can't be unpacked") from error


class FiledTensors:
    """Tensors that are made piece by piece, in a nameless file: memory holds what is looked at, and may drop it."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where the file lies; by default the system's for temporary files."""
        self.folder = folder
        self._spill: Spill | None = None
        self._places: dict[tuple[str, str], tuple[int, int, torch.dtype, torch.Size]] = {}  # by group and name

    def put(self, group: str, name: str, base: Tensor, packed: Any) -> None:
        """Write what a difference makes of a tensor; raises Refused where that is none of its form."""
        begin, end = self._written(unpack(base, packed))
        self._places[group, name] = begin, end, base.dtype, base.shape

    def put_packed(self, group: str, name: str, base: Tensor, tensor: Tensor, spared: int) -> bool:
        """Write a tensor as its difference; returns whether that spares so many bytes, and keeps nothing else."""
        pieces = (torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pack(base, tensor) if piece)
        begin, end = self._written(pieces)
        if end - begin > tensor.nbytes - spared:
            self._shorten(begin)
            return False
        self._places[group, name] = begin, end, torch.uint8, torch.Size([end - begin])
        return True

    def _written(self, pieces: Iterator[Tensor]) -> tuple[int, int]:
        """Return where pieces begin and end; what was written before an error is given back."""
        spill = self._spill = self._spill or Spill(self.folder)
        spill.align()
        begin = spill.end
        try:
            for piece in pieces:
                spill.append(piece)
        except MedsiloError:
            self._shorten(begin)
            raise
        return begin, spill.end

    def _shorten(self, end: int) -> None:
        if self._spill:
            self._spill.shorten(end)

    def tensors(self) -> Groups:
        """Return all of them."""
        groups: Groups = {}
        content = self._spill.mapped() if self._spill and self._places else torch.empty(0, dtype=torch.uint8)
        for (group, name), (begin, end, dtype, shape) in self._places.items():
            groups.setdefault(group, {})[name] = content[begin:end].view(dtype).reshape(shape)
        return groups
