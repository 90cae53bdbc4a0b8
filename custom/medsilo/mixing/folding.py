"""Fold sites' contributions into a mean, strip by strip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.mixing.layout import Block, Layout, Tensors, TypeSection

# Numbers of a mean that all contributions are folded into before the next are looked at: so many that the cost of
# calling torch does not show; what is at work, in double precision, lies in a processor's second and third cache.
STRIP = 1 << 17


class Strip:
    """Numbers of a section that follow each other, and where they are worked on in double precision."""

    def __init__(self, block: Block, shapes: Mapping[str, torch.Size], theta: Tensor, mean: Tensor) -> None:
        self.block, self.theta, self.mean = block, theta[: block.size], mean[: block.size]
        self._shapes = [shapes[piece.name] if piece.whole else (piece.stop - piece.start,) for piece in block.pieces]
        self.theta_parts, self.mean_parts = self.parts(self.theta), self.parts(self.mean)

    def parts(self, numbers: Tensor) -> list[Tensor]:
        """Cut numbers [size] as the tensors lie in them: whole ones in their own shape, so that nobody has to look at
        them as vectors first."""
        parts = numbers.split_with_sizes(self.block.sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

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
    """The memory in which a section's strips are worked on; used for one contribution, or several, after the other."""

    def __init__(self, section: TypeSection) -> None:
        self.section = section
        shapes = dict(zip(section.names, section.shapes, strict=True))
        theta, mean = section.scratch(STRIP)
        self.strips = [Strip(block, shapes, theta, mean) for block in section.cut(STRIP)]
        self.read = torch.empty(min(STRIP, section.size), dtype=section.dtype)
        self.rounded = torch.empty(min(STRIP, section.size), dtype=section.kept)

    def add(self, mean: Tensors, shares: Mapping[str, float], waiting: Contributions, origin: Tensors | None) -> None:
        """m ← m + a (θ - m) for one site after the other, with its share a of what has come so far; of the ways from
        `origin` where that is given. Each step is in double precision, and m is rounded to its own after it."""
        contributions = [(site, waiting.held(site), share) for site, share in shares.items()]
        for strip in self.strips:
            block, kept = strip.block, strip.of(mean)
            rounded = self.rounded[: block.size]
            first = strip.of(origin) if origin else []
            for place, (site, held, share) in enumerate(contributions):
                if held is not None and share == 1.0 and not first and len(contributions) == 1:
                    torch._foreach_copy_(kept, strip.of(held))  # the first: it is the mean so far
                    break
                if held is None:
                    strip.theta.copy_(waiting.read(site, self.section, block.start, self.read[: block.size]))
                else:
                    torch._foreach_copy_(strip.theta_parts, strip.of(held))
                if first:
                    torch._foreach_sub_(strip.theta_parts, first)
                if place:
                    strip.mean.copy_(rounded.copy_(strip.mean))
                elif share != 1.0:
                    torch._foreach_copy_(strip.mean_parts, kept)
                if share == 1.0:
                    strip.mean.copy_(strip.theta)
                else:
                    strip.mean.lerp_(strip.theta, share)
            else:
                torch._foreach_copy_(kept, strip.mean_parts)


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
