"""Store the tensors that sites send in a round; the server later aggregates the stored tensors block by block.

A row contains the tensors of one site and never changes. If NVFlare received a row as an unnamed temporary file, the
server reads the row from the temporary file. If all rows together exceed the memory limit, rows in memory are written
to an unnamed file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.mmap_store import Slice, Spill, let_go, stretches_of
from medsilo.mixing.layout import Block, Layout, Tensors, TypeSection

MEMORY = 512 << 20  # limit on the bytes of all rows in memory; rows beyond the limit are written to files


@dataclass(frozen=True)
class SiteRow:
    tensors: Tensors
    files: list[Slice]  # for each file that stores tensors of the site, the range of bytes that these tensors occupy
    size: int  # number of bytes that the tensors take in memory


class Contributions:
    def __init__(self) -> None:
        self._rows: dict[str, SiteRow] = {}
        self._spill: Spill | None = None  # temporary file with the rows that exceed the memory limit

    def __contains__(self, site: str) -> bool:
        return site in self._rows

    def put(self, site: str, tensors: Tensors, names: Iterable[str], at_once: bool = False) -> None:
        """Store a site's tensors with the given names; if the disk is full, the stored rows stay unchanged.

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
        """Yield the tensors of each site; the memory of a site's mapped file is released before the next site's tensors
        are read.
        """
        for site in sites:
            yield self._rows[site].tensors
            let_go(self._rows[site].files)

    def columns(
        self, sites: Sequence[str], section: TypeSection, origin: Tensors | None
    ) -> Iterator[tuple[Block, Tensor]]:
        """Yield the rows block by block: each block contains the same columns of all rows, as a tensor [1 + sites,
        width] in double precision. Row 0 contains the last model, or zeros, and each of the following rows contains a
        site's difference from row 0.
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

    If the last model is given, θ is the difference between the site's model and the last model. Each update of the mean
    uses the mean's data type, which has at least single precision. Double precision would hardly improve the mean,
    because the mean is rounded at the end. The function adds all sites to one block of the mean before the next
    block, so that a block stays in the processor's cache.
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
                if share == 1.0:  # if only one site answered, the mean equals this site's tensors
                    torch._foreach_copy_(kept, came)
                else:
                    torch._foreach_lerp_(kept, came, share)
