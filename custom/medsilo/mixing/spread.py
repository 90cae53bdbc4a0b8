"""Numbers that a server multiplies with: one for a whole group, one per tensor, or one per element."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.spill import Spill, StoredVector
from medsilo.mixing.layout import Layout, TypeSection

# One number, or by a tensor's name a number or a tensor of its shape. Tensors that are not averaged need none.
Numbers = float | Mapping[str, float | Tensor]


@dataclass(frozen=True)
class Spread:
    """Numbers that fit a layout. They are held as they were given, without a copy."""

    layout: Layout
    numbers: Mapping[str, float | Tensor]

    @classmethod
    def of(cls, numbers: Numbers, layout: Layout, title: str) -> "Spread":
        """Check the numbers, which must be finite and not negative; a MedsiloError names the first that is wrong."""
        wanted = [name for section in layout.sections for name in section.names]
        given = numbers if isinstance(numbers, Mapping) else dict.fromkeys(wanted, numbers)
        for name in wanted:
            if name not in given:
                raise MedsiloError(f"{title}: no number for {name}; give one for every tensor that is averaged")
            value, shape = torch.as_tensor(given[name]), layout.signature[name][0]
            if value.ndim and value.shape != shape:
                raise MedsiloError(
                    f"{title}: {name} has shape {list(value.shape)}; give one number, or a tensor {list(shape)}"
                )
            if value.numel() and not (value.isfinite().all() and value.min() >= 0):
                raise MedsiloError(f"{title}: {name} has a number that is negative, infinite or NaN")
        return cls(layout, given)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the numbers of each block of the layout's sections, in double precision."""
        for section in self.layout.sections:
            for block in section.blocks:
                into = torch.empty(block.size, dtype=torch.float64)
                for piece, part in zip(block.pieces, into.split(block.sizes), strict=True):
                    number = self.numbers[piece.name]
                    if isinstance(number, Tensor) and number.ndim:
                        part.copy_(piece.of({piece.name: number.contiguous()}))
                    else:
                        part.fill_(float(number))
                yield into

    def stored(self, folder: str | Path | None = None) -> "StoredSpread":
        """Write the numbers to a temporary file."""
        spill = Spill(folder)
        return StoredSpread([StoredVector.put(numbers, spill) for numbers in self.blocks()])


@dataclass(frozen=True)
class StoredSpread:
    """Numbers that wait in a file."""

    vectors: list[StoredVector]

    def blocks(self) -> Iterator[Tensor]:
        """Yield the numbers of each block."""
        return (vector.read() for vector in self.vectors)


class Totals:
    """The weight of every element so far, in single precision at least: as much memory as one parcel."""

    def __init__(self, layout: Layout) -> None:
        self._vectors = [
            torch.zeros(width, dtype=_real(section)) for section in layout.sections for width in section.widths
        ]

    def shares(self, weights: Spread | StoredSpread) -> Iterator[Tensor]:
        """Add weights, and yield their share of the total, block by block; 0 where nobody weighs anything."""
        for total, own in zip(self._vectors, weights.blocks(), strict=True):
            own = own.to(total.dtype)
            total += own
            yield torch.where(total > 0, own.double() / total.double(), 0.0)


def _real(section: TypeSection) -> torch.dtype:
    return section.kept.to_real() if section.kept.is_complex else section.kept
