"""Store the tensors that sites send in a round until the server aggregates the tensors block by block.

A row holds one site's tensors and never changes. A row that NVFlare received as an unnamed temporary file is read from
this file. Rows in memory are written to an unnamed file when all rows together exceed the memory limit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.mmap_store import Slice, Spill, let_go, stretches_of
from medsilo.mixing.layout import Block, Layout, Tensors, TypeSection

MEMORY = 512 << 20  # largest number of bytes of all rows in memory; further rows are written to files


@dataclass(frozen=True)
class SiteRow:
    tensors: Tensors
    files: list[Slice]  # the ranges of bytes in files that contain the tensors
    size: int  # bytes of the tensors in memory


class Contributions:
    def __init__(self) -> None:
        self._rows: dict[str, SiteRow] = {}
        self._spill: Spill | None = None  # temporary file of the rows that exceed the memory limit

    def __contains__(self, site: str) -> bool:
        return site in self._rows

    def put(self, site: str, tensors: Tensors, names: Iterable[str], at_once: bool = False) -> None:
        """Store a site's tensors of these names; a full disk leaves the stored rows unchanged.

        Args:
            at_once: True if the caller drops this row before it stores the next row
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
                    f"{site}: the site's tensors arrived before their turn, and can't be stored until then: {error}",
                    private=error.private,
                ) from error
        let_go(row.files)
        self._rows[site] = row

    def _in_file(self, tensors: Tensors) -> SiteRow:
        self._spill = self._spill or Spill()
        written = dict(zip(tensors, self._spill.put(tensors.values()), strict=True))
        return SiteRow(written, stretches_of(written.values()), 0)

    def each(self, sites: Iterable[str]) -> Iterator[Tensors]:
        """Yield the tensors of each site, and release the memory of the site's mapped file before the next site."""
        for site in sites:
            yield self._rows[site].tensors
            let_go(self._rows[site].files)

    def columns(
        self, sites: Sequence[str], section: TypeSection, origin: Tensors | None
    ) -> Iterator[tuple[Block, Tensor]]:
        """Yield each block of all rows' columns, as a tensor [1 + sites, width] in double precision. Row 0 contains the
        last model, or zeros, and each further row contains a site's difference from row 0.
        """
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
        for site in sites:
            self._rows.pop(site, None)

    def clear(self) -> None:
        self._rows.clear()
        self._spill = None


def fold(
    mean: Tensors, layout: Layout, rows: Contributions, shares: Mapping[str, float], origin: Tensors | None
) -> None:
    """Update the mean m ← m + a (θ - m) for each site, where a is this site's fraction of the weights added so far.

    If the last model is given, θ is the site's difference from the last model. Each update uses the mean's data type,
    which has at least single precision. Double precision would hardly improve the mean, because the mean is rounded at
    the end. The function adds all sites to one block of the mean before the next block, so that the block stays in the
    processor's cache.
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
                if share == 1.0:  # the mean of one site's tensors is this site's tensors
                    torch._foreach_copy_(kept, came)
                else:
                    torch._foreach_lerp_(kept, came, share)
