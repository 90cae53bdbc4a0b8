"""Store the tensors that sites sent in a round until the server aggregates them block by block.

A row holds one site's tensors and never changes. Over NVFlare, a row's tensors are read from the unnamed temporary file
that received them. Rows in memory are also written to an unnamed file when all rows together exceed the memory limit.
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
    """The tensors of one site's answer."""

    tensors: Tensors
    files: list[Slice]  # the parts of files that contain the tensors
    size: int  # bytes of the tensors in memory


class Contributions:
    """The rows of all sites that have sent tensors in the open round."""

    def __init__(self) -> None:
        self._rows: dict[str, SiteRow] = {}
        self._spill: Spill | None = None  # the file of the rows that exceed the memory limit

    def __contains__(self, site: str) -> bool:
        return site in self._rows

    def put(self, site: str, tensors: Tensors, names: Iterable[str], at_once: bool = False) -> None:
        """Store a site's tensors of the given names. When the disk is full, the stored rows stay unchanged.

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
        """Write a row's tensors to the round's temporary file."""
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
        """Yield a block of columns of all rows at a time, as a tensor [1 + sites, width] in double precision. Row 0 has
        the numbers of `origin`, or zeros; each further row has a site's difference from row 0.
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
        """Delete the rows of the given sites."""
        for site in sites:
            self._rows.pop(site, None)

    def clear(self) -> None:
        """Delete all rows and the temporary file."""
        self._rows.clear()
        self._spill = None


def fold(
    mean: Tensors, layout: Layout, rows: Contributions, shares: Mapping[str, float], origin: Tensors | None
) -> None:
    """Update the mean m ← m + a (θ - m) for each site, where a is the site's share of the weights added so far.

    If `origin` is given, θ is the site's difference from `origin`. Each step uses the mean's number type, which has at
    least single precision. Double precision would hardly improve the mean of many sites, because the result is rounded
    to the mean's type. All sites are added to one block of the mean before the next block, so that the block stays in
    the processor's cache.
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
                if share == 1.0:  # the first site's numbers are the mean so far
                    torch._foreach_copy_(kept, came)
                else:
                    torch._foreach_lerp_(kept, came, share)
