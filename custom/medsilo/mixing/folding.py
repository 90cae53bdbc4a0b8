"""Fold sites' contributions into a mean, strip by strip."""

from collections.abc import Mapping

import torch
from torch import Tensor

from medsilo.mixing.layout import Block, Tensors, TypeSection
from medsilo.mixing.waiting import WaitingRoom

# Numbers of a mean that all contributions are folded into before the next are looked at: so many that the cost of
# calling torch does not show; what is at work, in double precision, lies in a processor's second and third cache.
STRIP = 1 << 17


class Strip:
    """Numbers of a section that follow each other, and where a site's are put in double precision."""

    def __init__(self, block: Block, theta: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        self.block = block
        self.theta = theta[: block.size]
        # Whole tensors are copied as they are, in their own shape: nobody has to look at them as vectors first.
        self.parts = [
            part.view(shapes[piece.name]) if piece.whole else part
            for piece, part in zip(block.pieces, self.theta.split_with_sizes(block.sizes), strict=True)
        ]

    def of(self, tensors: Tensors) -> list[Tensor]:
        """Return the strip's tensors, and stretches of long ones, without a copy."""
        return [tensors[piece.name] if piece.whole else piece.of(tensors) for piece in self.block.pieces]


class SectionFold:
    """The memory in which a section's strips are worked on; used for one contribution, or several, after the other."""

    def __init__(self, section: TypeSection) -> None:
        self.section = section
        theta, self.mean = section.scratch(STRIP)
        shapes = dict(zip(section.names, section.shapes, strict=True))
        self.strips = [Strip(block, theta, shapes) for block in section.cut(STRIP)]
        self.read = torch.empty(min(STRIP, section.size), dtype=section.dtype)

    def add(self, mean: Tensor, shares: Mapping[str, float], waiting: WaitingRoom, origin: Tensors | None) -> None:
        """m ← m + a (θ - m) for one site after the other, with its share a of what has come so far; of the ways from
        `origin` where that is given. Each step is in double precision, and m is rounded to its own after it."""
        contributions = [(site, waiting.held(site), share) for site, share in shares.items()]
        for strip in self.strips:
            block = strip.block
            kept = mean[block.start : block.start + block.size]
            m = self.mean[: block.size]
            first = strip.of(origin) if origin else []
            for site, held, share in contributions:
                if held is None:
                    strip.theta.copy_(waiting.read(site, self.section, block.start, self.read[: block.size]))
                else:
                    torch._foreach_copy_(strip.parts, strip.of(held))
                if first:
                    torch._foreach_sub_(strip.parts, first)
                if share == 1.0:
                    kept.copy_(strip.theta)
                else:
                    kept.copy_(m.copy_(kept).lerp_(strip.theta, share))
