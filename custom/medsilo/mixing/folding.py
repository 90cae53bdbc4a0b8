"""Fold sites' contributions into a mean, strip by strip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.mixing.layout import Block, Layout, Tensors, TypeSection

# Numbers of a mean that all contributions are folded into before the next are looked at: so many that the cost of
# calling torch does not show; the mean's and a contribution's lie in a processor's second cache.
STRIP = 1 << 17


class Strip:
    """Numbers of a section that follow each other, and room for a contribution's that can't be used where they lie."""

    def __init__(self, block: Block, shapes: Mapping[str, torch.Size], room: Tensor) -> None:
        self.block, self.room = block, room[: block.size]
        own = [shapes[piece.name] if piece.whole else (piece.stop - piece.start,) for piece in block.pieces]
        parts = self.room.split_with_sizes(block.sizes)
        # As the tensors lie in them: whole ones in their own shape, so that nobody looks at them as vectors first.
        self.parts = [part.view(shape) for part, shape in zip(parts, own, strict=True)]

    def of(self, tensors: Tensors) -> list[Tensor]:
        """Return the strip's tensors, and stretches of long ones, without a copy."""
        return [tensors[piece.name] if piece.whole else piece.of(tensors) for piece in self.block.pieces]


class Contributions(Protocol):
    """A place where contributions lie, by name."""

    def held(self, name: str) -> Tensors | None:
        """Return one that lies in memory."""

    def read(self, name: str, section: TypeSection, start: int, numbers: Tensor) -> Tensor:
        """Fill a vector of the section's type with another one's numbers from there on."""


@dataclass(frozen=True)
class Single:
    """One contribution, which lies in memory."""

    tensors: Tensors

    def held(self, name: str) -> Tensors:
        return self.tensors

    def read(self, name: str, section: TypeSection, start: int, numbers: Tensor) -> Tensor:
        raise MedsiloError("a mean that lies in memory was looked for on the disk")


class SectionFold:
    """A section's strips and the memory in which contributions are made ready for them, one after the other."""

    def __init__(self, section: TypeSection) -> None:
        self.section = section
        width, shapes = min(STRIP, section.size), dict(zip(section.names, section.shapes, strict=True))
        room = torch.empty(width, dtype=section.kept)
        self.strips = [Strip(block, shapes, room) for block in section.cut(STRIP)]
        self.read = torch.empty(width, dtype=section.dtype)

    def add(self, mean: Tensors, shares: Mapping[str, float], waiting: Contributions, origin: Tensors | None) -> None:
        """m ← m + a (θ - m) for one site after the other, with its share a of what has come so far; of the ways from
        `origin` where that is given.

        Each step is in the mean's own type, single precision at least. In double precision it would be rounded to that
        all the same, and the mean of many sites be hardly nearer to the true one.
        """
        contributions = [(site, waiting.held(site), share) for site, share in shares.items()]
        for strip in self.strips:
            kept, first = strip.of(mean), strip.of(origin) if origin else []
            for site, held, share in contributions:
                came = self._ready(strip, site, held, waiting, first)
                if share == 1.0:  # the first: it is the mean so far
                    torch._foreach_copy_(kept, came)
                else:
                    torch._foreach_lerp_(kept, came, share)

    def _ready(
        self, strip: Strip, site: str, held: Tensors | None, waiting: Contributions, first: list[Tensor]
    ) -> list[Tensor]:
        """Return a contribution's numbers in the mean's type, less those of `first`."""
        if held is None:
            block = strip.block
            strip.room.copy_(waiting.read(site, self.section, block.start, self.read[: block.size]))
        elif not first and held[self.section.names[0]].dtype == self.section.kept:
            return strip.of(held)
        else:
            torch._foreach_copy_(strip.parts, strip.of(held))
        if first:
            torch._foreach_sub_(strip.parts, first)
        return strip.parts


class PartMean:
    """The mean of a part's sites, who are added in sorted order; elsewhere than where the parts' mean is taken."""

    def __init__(self, like: Tensors) -> None:
        """like: tensors of the names, shapes and types of what is added."""
        self.layout = Layout(like)
        self.total = 0.0
        self._mean = self.layout.rooms()
        self._folds = [SectionFold(section) for section in self.layout.sections]
        self._carried: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, tensors: Tensors, weight: float) -> None:
        """Add a site's tensors."""
        own = {name: tensor.contiguous() for name, tensor in tensors.items()}
        if not self.total:
            self._carried = {name: own[name] for name in self.layout.carried}
        self.total += weight
        for fold in self._folds:
            fold.add(self._mean, {"": weight / self.total}, Single(own), None)

    def result(self) -> dict[str, Tensor]:
        """Return the mean, in single precision at least, and of whole numbers those of the first site."""
        return {**self._mean, **self._carried}

    @classmethod
    def layout_of(cls, like: Tensors) -> dict[str, Tensor]:
        """Return tensors without values of the names, shapes and types of such a mean."""
        layout = Layout(like)
        kept = {name: section.kept for section in layout.sections for name in section.names}
        return {name: torch.empty_like(tensor, dtype=kept.get(name, tensor.dtype)) for name, tensor in like.items()}
