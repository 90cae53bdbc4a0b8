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

    Their file is written anew from its beginning once nobody waits in it any more: it takes no more disk from round to
    round, and a system that still holds it in memory has no new memory to find.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self.memory = MEMORY
        self._held: dict[str, tuple[Tensors, int]] = {}
        self._begins: dict[str, int] = {}  # of those in the file
        self._spill: Spill | None = None

    def __contains__(self, site: str) -> bool:
        return site in self._held or site in self._begins

    def put(self, site: str, tensors: Tensors, layout: Layout, next_one: bool = False) -> None:
        """Keeps the tensors that will be averaged; those of the next one, who goes at once, in memory in any case.

        When the disk is full, everything stays as it was.
        """
        if next_one or layout.bytes + sum(size for _, size in self._held.values()) <= self.memory:
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

    def held(self, site: str) -> Tensors | None:
        """Return the site's contribution if it waits in memory."""
        held = self._held.get(site)
        return held[0] if held else None

    def read(self, site: str, section: TypeSection, start: int, numbers: Tensor) -> Tensor:
        """Fill a vector of the section's type with the site's numbers from there on, which wait in the file."""
        assert self._spill is not None
        try:
            return self._spill.read(self._begins[site] + section.offset + start * section.dtype.itemsize, numbers)
        except MedsiloError as error:
            raise MedsiloError(f"{site}: {error}") from error

    def reader(self, site: str) -> Read:
        """Return what reads the site's contribution, block by block."""
        if site in self._held:
            return reading(self._held[site][0])

        def read(section: TypeSection, block: Block, into: Tensor) -> None:
            into.copy_(self.read(site, section, block.start, torch.empty(block.size, dtype=section.dtype)))

        return read

    def drop(self, site: str) -> None:
        """Forgets the site's contribution."""
        self._held.pop(site, None)
        self._begins.pop(site, None)
        if self._spill and not self._begins:
            self._spill.end = 0

    def clear(self) -> None:
        """Forgets every contribution."""
        for site in [*self._held, *self._begins]:
            self.drop(site)
