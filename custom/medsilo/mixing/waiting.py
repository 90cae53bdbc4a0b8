"""Where a contribution waits until its turn: a little in memory, the rest in a nameless file."""

import tempfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from medsilo.errors import MedsiloError
from medsilo.mixing.layout import Block, Layout, Section, Tensors

# Bytes of all contributions together that may wait in memory, unless told otherwise; the others wait on the disk.
MEMORY = 4 << 20

# Copies the numbers of one block of a section into a vector.
Read = Callable[[Section, Block, Tensor], None]


def reading(tensors: Tensors) -> Read:
    """Reads tensors that are in memory."""
    return lambda _, block, into: block.read(tensors, into)


def way(read: Read, origin: Tensors) -> Read:
    """Reads how far it is from there: θ - origin."""

    def subtracted(section: Section, block: Block, into: Tensor) -> None:
        read(section, block, into)
        block.subtract(origin, into)

    return subtracted


class WaitingRoom:
    """Contributions that came before their turn, to be read back block by block.

    The file has no name (nothing to clean up after a crash), only grows, and goes when nobody waits in it any more.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self.memory = MEMORY
        self._held: dict[str, tuple[Tensors, int]] = {}
        self._spilled: dict[str, int] = {}
        self._file: FileIO | None = None
        self._end = 0

    def __contains__(self, site: str) -> bool:
        return site in self._held or site in self._spilled

    def put(self, site: str, tensors: Tensors, layout: Layout) -> None:
        """Keeps the tensors that will be averaged. When the disk is full, everything stays as it was."""
        if layout.bytes + sum(size for _, size in self._held.values()) <= self.memory:
            self._held[site] = (tensors, layout.bytes)
            return
        end = self._end
        try:
            for section in layout.sections:
                for name in section.names:
                    end += self._write(end, tensors[name])
        except OSError as error:
            self._shorten()
            raise MedsiloError(
                f"{site}: its contribution came before its turn and cannot be stored meanwhile "
                f"({error.strerror or type(error).__name__}): free some room for temporary files on the server",
                private=str(self._folder or tempfile.gettempdir()),
            ) from error
        self._spilled[site] = self._end
        self._end = end

    def reader(self, site: str) -> Read:
        """What reads the site's contribution, block by block."""
        if site in self._held:
            return reading(self._held[site][0])
        begin = self._spilled[site]

        def read(section: Section, block: Block, into: Tensor) -> None:
            into.copy_(self._load(site, section, block, begin))

        return read

    def drop(self, site: str) -> None:
        """Forgets the site's contribution."""
        self._held.pop(site, None)
        self._spilled.pop(site, None)
        if not self._spilled:
            self._end = 0
            self._shorten()

    def clear(self) -> None:
        """Forgets every contribution."""
        for site in [*self._held, *self._spilled]:
            self.drop(site)

    def _write(self, position: int, tensor: Tensor) -> int:
        """Writes the tensor's bytes as they lie in memory; returns how many."""
        if tensor.numel() == 0:
            return 0
        if self._file is None:
            # Unbuffered: what does not fit must show here, not in some later call.
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (lives until shortened)
        self._file.seek(position)
        rest = _bytes(tensor)
        size = len(rest)
        while rest:
            rest = rest[self._file.write(rest) :]
        return size

    def _load(self, site: str, section: Section, block: Block, begin: int) -> Tensor:
        numbers = torch.empty(block.size, dtype=section.dtype)
        into = _bytes(numbers)
        try:
            assert self._file is not None
            self._file.seek(begin + section.offset + block.start * section.dtype.itemsize)
            done = self._file.readinto(into)
        except OSError as error:
            raise MedsiloError(f"{site}: its stored contribution cannot be read back: {error.strerror}") from error
        if done != len(into):
            raise MedsiloError(f"{site}: its stored contribution is incomplete on the server's disk")
        return numbers

    def _shorten(self) -> None:
        """Gives back the disk space behind the last contribution."""
        if self._file is None:
            return
        if self._end:
            self._file.truncate(self._end)
        else:
            self._file.close()
            self._file = None


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory (numpy has no bfloat16, therefore as bytes)."""
    return tensor.view(-1).view(torch.uint8).numpy().data
