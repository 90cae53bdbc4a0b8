"""Store tensors in a temporary file that has no name. The operating system frees the file after its last use, even if
the process crashes.
"""

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
# limits on the unused files that are kept for reuse: on their bytes, and on their number
MOST_SPARE, MOST_FILES = 1 << 30, 16
# the names that safetensors files use for PyTorch's types
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
    """A temporary file that has no name.

    A new object reuses a deleted object's file, because allocating a new file is slow: a tenth of a training round for
    29 million parameters.
    """

    spare: ClassVar[list[int]] = []

    def __init__(self) -> None:
        try:
            self.number = self.spare.pop()
        except IndexError:
            # If the file has no buffer, a write to a full disk fails at once.
            with tempfile.TemporaryFile(buffering=0) as file:
                self.number = os.dup(file.fileno())

    def __del__(self) -> None:
        if not hasattr(self, "number"):
            return
        self.spare.append(self.number)
        if sum(os.fstat(number).st_size for number in self.spare) > MOST_SPARE or len(self.spare) > MOST_FILES:
            os.close(self.spare.pop())


class _Mapping(mmap.mmap):
    """A memory mapping that refers to the mapped file, so that no other object reuses the file while the mapping
    exists.
    """

    file: _File


class Spill:
    """A temporary file that contains the bytes of tensors, one tensor after another."""

    def __init__(self) -> None:
        self.end = 0
        try:
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
        """Append a tensor, and return the tensor's offset in the file.

        Raises NoRoom if the disk is full; the tensors that were written before stay intact.
        """
        begin = self.end
        try:
            self.end = self._write(bytes_of(tensor), begin)
        except OSError as error:
            self.shorten(begin)
            self._refuse(error)
        return begin

    def _write(self, content: memoryview, begin: int) -> int:
        # A nearly full disk may write only some of the bytes; the next attempt to write the rest then raises an error.
        while content:
            written = os.pwritev(self._file.number, [content], begin)
            content, begin = content[written:], begin + written
        return begin

    def put(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Append tensors to the file, and return memory-mapped tensors with the same values.

        Raises NoRoom if the disk is full; the tensors that were written before stay intact.
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
        # an empty last tensor begins at an aligned offset, which may lie beyond the end of the file
        if os.fstat(self._file.number).st_size < self.end:
            self.shorten(self.end)
        content = self.mapped(begin)
        return [content[place : place + size].view(dtype).view(shape) for place, size, dtype, shape in places]

    def align(self) -> None:
        """Round the end of the data up to a multiple of ALIGNED, so that a tensor of any number type can follow."""
        self.end += -self.end % ALIGNED

    def mapped(self, begin: int = 0) -> Tensor:
        """Return all bytes of the file from the offset `begin` as a memory-mapped tensor, which may outlive this
        object.

        The caller must not change the tensor's values, because `let_go` drops changed memory pages without saving them.
        """
        if self.end == begin:
            return torch.empty(0, dtype=torch.uint8)
        try:
            content = _Mapping(self._file.number, self.end - begin, access=mmap.ACCESS_COPY, offset=begin)
        except (OSError, ValueError) as error:
            raise MedsiloError(f"the tensors on the server's disk cannot be mapped into memory: {error}") from error
        content.file = self._file
        numbers = torch.frombuffer(content, dtype=torch.uint8)
        _MAPPED[numbers.data_ptr()] = content
        return numbers

    def shorten(self, end: int) -> None:
        os.truncate(self._file.number, end)
        self.end = end


# mappings by the memory address at which each mapping begins
_MAPPED: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


# a mapped file, the offset of the slice's first byte, and the offset after the slice's last byte
Slice = tuple[mmap.mmap, int, int]


def stretches_of(tensors: Iterable[Tensor]) -> list[Slice]:
    """Return the parts of mapped files that contain the given tensors; tensors in ordinary memory are left out."""
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
    """Drop the memory pages of the given slices of mapped files from memory. The operating system reads a dropped page
    from the file when a program next uses the page.
    """
    for content, begin, end in stretches:
        begin -= begin % mmap.PAGESIZE
        content.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def stored(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Write tensors to a new file one by one, and return memory-mapped tensors with the same values."""
    return Spill().put(tensors)


# A forked child process must not reuse the files of the parent process.
os.register_at_fork(after_in_child=_File.spare.clear)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory as bytes, without a copy.

    The tensor is first viewed as uint8, because numpy has no type for bfloat16.
    """
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
