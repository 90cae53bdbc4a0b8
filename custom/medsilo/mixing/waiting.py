"""Let a contribution wait until its turn: a little in memory, the rest in a nameless file."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.spill import Spill
from medsilo.mixing.layout import Block, Layout, Tensors, TypeSection

# Bytes of all contributions together that may wait in memory, unless told otherwise; the others wait on the disk.
MEMORY = 4 << 20

# Copies the numbers of one block of a section into a vector.
Read = Callable[[TypeSection, Block, Tensor], None]


def reading(tensors: Tensors) -> Read:
    """Reads tensors that are in memory."""
    return lambda _, block, into: block.read(tensors, into)


def way(read: Read, origin: Tensors) -> Read:
    """Reads how far it is from there: θ - origin."""

    def subtracted(section: TypeSection, block: Block, into: Tensor) -> None:
        read(section, block, into)
        block.subtract(origin, into)

    return subtracted


class WaitingRoom:
    """Contributions that came before their turn, to be read back block by block.

    Their file only grows, and goes when nobody waits in it any more.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self.memory = MEMORY
        self._held: dict[str, tuple[Tensors, int]] = {}
        self._begins: dict[str, int] = {}  # of those in the file
        self._spill: Spill | None = None

    def __contains__(self, site: str) -> bool:
        return site in self._held or site in self._begins

    def put(self, site: str, tensors: Tensors, layout: Layout) -> None:
        """Keeps the tensors that will be averaged. When the disk is full, everything stays as it was."""
        if layout.bytes + sum(size for _, size in self._held.values()) <= self.memory:
            self._held[site] = (tensors, layout.bytes)
            return
        begin = self._spill.end if self._spill else 0
        try:
            self._spill = self._spill or Spill(self._folder)
            for section in layout.sections:
                for name in section.names:
                    self._spill.append(tensors[name])
        except MedsiloError as error:
            if self._spill:
                self._spill.shorten(begin)
            raise MedsiloError(
                f"{site}: its contribution came before its turn and cannot be stored meanwhile: {error}",
                private=error.private,
            ) from error
        self._begins[site] = begin

    def reader(self, site: str) -> Read:
        """Return what reads the site's contribution, block by block."""
        if site in self._held:
            return reading(self._held[site][0])
        spill, begin = self._spill, self._begins[site]
        assert spill is not None

        def read(section: TypeSection, block: Block, into: Tensor) -> None:
            numbers = torch.empty(block.size, dtype=section.dtype)
            place = begin + section.offset + block.start * section.dtype.itemsize
            try:
                into.copy_(spill.read(place, numbers))
            except MedsiloError as error:
                raise MedsiloError(f"{site}: {error}") from error

        return read

    def drop(self, site: str) -> None:
        """Forgets the site's contribution."""
        self._held.pop(site, None)
        self._begins.pop(site, None)
        if not self._begins:
            self._spill = None

    def clear(self) -> None:
        """Forgets every contribution."""
        for site in [*self._held, *self._begins]:
            self.drop(site)
