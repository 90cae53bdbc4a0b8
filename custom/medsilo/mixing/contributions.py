"""A round's contributions until they are mixed: a row of tensors for each site, read block by block.

A row is never changed. Over NVFlare its tensors lie in a nameless file already, and are read from there. Rows in memory
go to such a file, too, when all rows together would take more memory than is allowed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.mmap_store import Slice, Spill, let_go, stretches_of
from medsilo.mixing.layout import Block, Layout, Tensors, TypeSection

MEMORY = 512 << 20  # bytes of all rows together that may be in memory; the others lie in files


@dataclass(frozen=True)
class SiteRow:
    """The tensors of one site's answer."""

    tensors: Tensors
    files: list[Slice]  # where it lies in files
    size: int  # bytes in memory


class Contributions:
    """The rows of those sites that have sent tensors."""

    def __init__(self) -> None:
        self._rows: dict[str, SiteRow] = {}
        self._spill: Spill | None = None  # of those that do not lie in memory

    def __contains__(self, site: str) -> bool:
        return site in self._rows

    def put(self, site: str, tensors: Tensors, names: Iterable[str], at_once: bool = False) -> None:
        """Take a site's tensors of these names. at_once: this row is dropped again before another is put.

        When the disk is full, everything stays as it was.
        """
        own = {name: tensors[name] for name in names}
        files = stretches_of(own.values())
        size = sum(tensor.nbytes for tensor in own.values() if not (files and stretches_of([tensor])))
        row = SiteRow(own, files, size)
        if size and not at_once and size + sum(other.size for other in self._rows.values()) > MEMORY:
            try:
                row = self._in_file(own)
            except MedsiloError as error:
                raise MedsiloError(
                    f"{site}: its contribution came before its turn and cannot be stored meanwhile: {error}",
                    private=error.private,
                ) from error
        let_go(row.files)
        self._rows[site] = row

    def _in_file(self, tensors: Tensors) -> SiteRow:
        """Write a row to the round's file."""
        self._spill = self._spill or Spill()
        written = dict(zip(tensors, self._spill.put(tensors.values()), strict=True))
        return SiteRow(written, stretches_of(written.values()), 0)

    def each(self, sites: Iterable[str]) -> Iterator[Tensors]:
        """Yield the tensors of one site after the other; the memory of a mapped file is released before the next."""
        for site in sites:
            yield self._rows[site].tensors
            let_go(self._rows[site].files)

    def columns(
        self, sites: Sequence[str], section: TypeSection, origin: Tensors | None
    ) -> Iterator[tuple[Block, Tensor]]:
        """Yield some columns of all rows at a time, [1 + sites, width] in double precision: the numbers of `origin`, or
        zeros, and each site's difference from them."""
        rows = [self._rows[site] for site in sites]
        models = [row.tensors for row in rows]
        for block, numbers in section.side_by_side([origin or models[0], *models]):
            if origin is None:
                numbers[0] = 0
            numbers[1:] -= numbers[0]
            yield block, numbers
            for row in rows:
                let_go(row.files)

    def drop(self, sites: Iterable[str]) -> None:
        """Forget these sites' rows."""
        for site in sites:
            self._rows.pop(site, None)

    def clear(self) -> None:
        """Forget every row, and the file."""
        self._rows.clear()
        self._spill = None


def fold(
    mean: Tensors, layout: Layout, rows: Contributions, shares: Mapping[str, float], origin: Tensors | None
) -> None:
    """m ← m + a (θ - m) for each site, with a, its share of the weights so far; θ is less `origin` where that is given.

    Each step is in the mean's own type, single precision at least. Double precision would hardly improve the mean of
    many sites, because the result is rounded to the mean's type. All sites go into one block of the mean
    before the next, so that it stays in the processor's cache.
    """
    for section in layout.sections:
        as_sent = origin is None and section.dtype == section.kept
        room = torch.empty(0 if as_sent else section.widest, dtype=section.kept)
        for block in section.blocks:
            kept, numbers = block.of(mean) if as_sent else block.flat(mean), room[: block.size]
            for share, row in zip(shares.values(), rows.each(shares), strict=True):
                if not as_sent:
                    block.read(row, numbers)
                    if origin is not None:
                        block.subtract(origin, numbers)
                came = block.of(row) if as_sent else numbers.split(block.sizes)
                if share == 1.0:  # the first: it is the mean so far
                    torch._foreach_copy_(kept, came)
                else:
                    torch._foreach_lerp_(kept, came, share)
