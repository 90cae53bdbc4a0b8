"""Tensors that wait in a file without a name: nothing to clean up after a crash, and gone with its last reader."""

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, NoRoom

ALIGNED = 64  # bytes
MOST_SPARE, MOST_FILES = 1 << 30, 16  # bytes and number of files that nobody reads, kept for the next
# What safetensors calls the types of numbers.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class _File:
    """A file without a name. It is handed on when nobody reads it any more: the system then has no new memory to find
    for the next, which is a tenth of a round of 29 M parameters.
    """

    spare: ClassVar[list[int]] = []

    def __init__(self) -> None:
        try:
            self.number = self.spare.pop()
        except IndexError:
            with tempfile.TemporaryFile(buffering=0) as file:  # unbuffered: what does not fit must show at once
                self.number = os.dup(file.fileno())

    def __del__(self) -> None:
        if not hasattr(self, "number"):
            return
        self.spare.append(self.number)
        if sum(os.fstat(number).st_size for number in self.spare) > MOST_SPARE or len(self.spare) > MOST_FILES:
            os.close(self.spare.pop())


class _Mapping(mmap.mmap):
    """Some of a file to read, which stays for as long."""

    file: _File


class Spill:
    """The file. Numbers lie in it as they do in memory, one tensor after another."""

    def __init__(self) -> None:
        self.end = 0
        try:  # unbuffered: what does not fit must show at once, not in some later call
            self._file = _File()
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> NoReturn:
        raise NoRoom(
            f"the disk does not take it ({error.strerror or type(error).__name__}): free some room for temporary files "
            "on the server",
            private=tempfile.gettempdir(),
        ) from error

    def append(self, tensor: Tensor) -> int:
        """Return where the tensor begins. When the disk is full, what it had is still there."""
        begin = self.end
        try:
            self.end = self._write(bytes_of(tensor), begin)
        except OSError as error:
            self.shorten(begin)
            self._refuse(error)
        return begin

    def _write(self, content: memoryview, begin: int) -> int:
        """Return where it ends."""
        while content:  # a full disk takes a part of it, and says why when it is asked for the rest
            written = os.pwritev(self._file.number, [content], begin)
            content, begin = content[written:], begin + written
        return begin

    def put(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors as they lie in the file from now on, to which each is written as soon as it is there.

        When the disk is full, what it had is still there.
        """
        self.end += -self.end % mmap.ALLOCATIONGRANULARITY
        begin, places = self.end, []
        try:
            for tensor in tensors:
                self.align()
                places.append((self.append(tensor) - begin, tensor.nbytes, tensor.dtype, tensor.shape))
        except MedsiloError:
            self.shorten(begin)
            raise
        if os.fstat(self._file.number).st_size < self.end:  # where an empty last one would begin
            self.shorten(self.end)
        content = self.mapped(begin)
        return [content[place : place + size].view(dtype).view(shape) for place, size, dtype, shape in places]

    def align(self) -> None:
        """Let the next tensor begin where any type of numbers may be mapped."""
        self.end += -self.end % ALIGNED

    def mapped(self, begin: int = 0) -> Tensor:
        """Return all bytes from there on as a tensor that is read from the file when it is looked at, and outlives this
        object.

        It is not to be changed: what memory holds of it is dropped now and then (`let_go`), and read again.
        """
        if self.end == begin:
            return torch.empty(0, dtype=torch.uint8)
        try:
            content = _Mapping(self._file.number, self.end - begin, access=mmap.ACCESS_COPY, offset=begin)
        except (OSError, ValueError) as error:
            raise MedsiloError(f"what was stored on the server's disk cannot be mapped: {error}") from error
        content.file = self._file
        numbers = torch.frombuffer(content, dtype=torch.uint8)
        _MAPPED[numbers.data_ptr()] = content
        return numbers

    def shorten(self, end: int) -> None:
        """Give back what comes after."""
        os.truncate(self._file.number, end)
        self.end = end


_MAPPED: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address where a file begins


Slice = tuple[mmap.mmap, int, int]  # of a mapped file, from and to which byte


def stretches_of(tensors: Iterable[Tensor]) -> list[Slice]:
    """Return where in mapped files tensors lie; nothing for those in memory."""
    found: dict[int, Slice] = {}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        content = _MAPPED.get(address)
        if content is not None and tensor.nbytes:
            begin = tensor.data_ptr() - address
            _, first, last = found.get(address, (content, begin, begin))
            found[address] = content, min(first, begin), max(last, begin + tensor.nbytes)
    return list(found.values())


def let_go(stretches: Iterable[Slice]) -> None:
    """Let memory drop what it holds of files; it is read again when it is looked at."""
    for content, begin, end in stretches:
        begin -= begin % mmap.PAGESIZE
        content.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def stored(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors as they lie in a file of their own, to which each is written as soon as it is there."""
    return Spill().put(tensors)


os.register_at_fork(after_in_child=_File.spare.clear)  # they are the parent's


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory (numpy has no bfloat16, therefore as bytes)."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
