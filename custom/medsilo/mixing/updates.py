"""Measure how far each site's update goes and where it points, by exact norms and small sketches; no model is kept.

A count sketch (Charikar et al. 2002; Weinberger et al. 2009) adds up a vector's numbers in WIDTH buckets, each with a
random sign that depends on its place alone. The cosine of two sketches is that of the vectors on average, with a
standard deviation of at most about 1 / √WIDTH, 1.6 %. Of a large model, SAMPLED numbers from stretches all over it are
sketched; where these lie is drawn in every round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medsilo.mixing.layout import BLOCK, Layout, Tensors

WIDTH = 4093  # a prime, so that numbers that follow each other in rows of a weight matrix spread over the buckets
ROWS = 16
SAMPLED = ROWS * WIDTH
SERIAL = 16 << 10  # numbers whose squares torch sums in one thread, so that any number of threads gives the same norm


@dataclass(frozen=True)
class Direction:
    """The norm of an update, and the sketch [WIDTH] of its direction, of length one; None where nothing changed."""

    norm: float
    sketch: Tensor | None


class Sketcher:
    """Measures the updates of one layout: the same places have the same signs at every site."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.blocks = [(section, block) for section in layout.sections for block in section.blocks]
        numbers = sum(section.size for section in layout.sections)
        share = min(1.0, (SAMPLED - len(self.blocks)) / max(numbers, 1))
        draw = torch.Generator().manual_seed(seed)
        self.signs = torch.randint(0, 2, (SAMPLED,), generator=draw, dtype=torch.int8).float().mul_(2).sub_(1)
        self.rooms = (torch.zeros(SAMPLED), torch.zeros(BLOCK))
        self.stretches: list[tuple[int, int]] = []  # of every block: what is sketched
        for _, block in self.blocks:
            length = math.ceil(share * block.size)
            begin = int(torch.randint(0, block.size - length + 1, (), generator=draw))
            self.stretches.append((begin, begin + length))

    def measure(self, sent: Tensors, given: Tensors) -> Direction:
        """Return how far it is from what a site was given to what it sent, and where that points.

        The norm is a finite number exactly where all numbers are finite.
        """
        direction = self._measure(sent, given, torch.float32, self.rooms)
        if math.isfinite(direction.norm):
            return direction
        # Squares may be too large for single precision.
        return self._measure(sent, given, torch.float64, [room.double() for room in self.rooms])

    def _measure(self, sent: Tensors, given: Tensors, dtype: torch.dtype, rooms: Sequence[Tensor]) -> Direction:
        norms: list[Tensor] = []
        (stream, room), end = rooms, 0
        for (section, block), (first, last) in zip(self.blocks, self.stretches, strict=True):
            update = room[: block.size]
            if len(block.pieces) == 1 and section.dtype == dtype:
                torch.sub(block.pieces[0].of(sent), block.pieces[0].of(given), out=update)
            else:
                block.read(sent, update)
                block.subtract(given, update)
            filled = -(-block.size // SERIAL) * SERIAL
            room[block.size : filled] = 0
            norms.append(torch.linalg.vector_norm(room[:filled].view(-1, SERIAL), dim=1))
            stream[end : end + last - first] = update[first:last]
            end += last - first
        norm = float(torch.cat(norms).double().square().sum().sqrt()) if norms else 0.0
        sketch = stream.mul_(self.signs).view(ROWS, WIDTH).sum(0)
        length = float(sketch.norm())
        return Direction(norm, (sketch / length).float() if 0 < length < math.inf else None)


@dataclass(frozen=True)
class Standing:
    """The direction of one update beside the others of a round; None where too few of them show it.

    cosine: against the mean of the others, each of which counts as if its norm were one, so that neither a long update
    nor many cases make one site the measure of all. agreement: the mean cosine of two of the others.
    """

    cosine: float | None = None
    agreement: float | None = None


def standings(directions: Mapping[str, Direction]) -> dict[str, Standing]:
    """Return where each site's update points beside the others'."""
    known = {site: own.sketch.double() for site, own in sorted(directions.items()) if own.sketch is not None}
    found = dict.fromkeys(directions, Standing())
    if len(known) < 2:
        return found
    total, others = torch.stack(list(known.values())).sum(0), len(known) - 1
    for site, sketch in known.items():
        rest = total - sketch
        squared = float(rest.square().sum())  # others + the cosines of all their ordered pairs
        cosine = _cosine(float(rest @ sketch) / math.sqrt(squared)) if squared > 0 else None
        agreement = _cosine((squared - others) / (others * (others - 1))) if others > 1 else None
        found[site] = Standing(cosine, agreement)
    return found


def _cosine(value: float) -> float:
    return max(-1.0, min(1.0, value))
