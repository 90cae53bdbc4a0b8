"""Record what shows of every site's updates in a round: how far they go, and where they point beside the others'.

By exact norms and small sketches; no model is kept. A count sketch (Charikar et al. 2002; Weinberger et al. 2009) adds
up a vector's numbers in WIDTH buckets, each with a random sign that depends on its place alone. The cosine of two
sketches is that of the vectors on average, with a standard deviation of at most about 1 / √WIDTH, 1.6 %. Of a large
model SAMPLED numbers are sketched, in stretches that are drawn again in every round.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

import torch
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups, Tensors
from medsilo.mixing.mixers import Aggregator
from medsilo.runs.fields import LARGEST
from medsilo.runs.rounds import Round, SentUpdate

WIDTH = 4093  # a prime, so that numbers that follow each other in rows of a weight matrix spread over the buckets
ROWS = 16
SAMPLED = ROWS * WIDTH
PIECE = 1 << 18  # numbers of a tensor that are measured at once
SERIAL = 16 << 10  # numbers that torch takes in one thread: any number of threads gives the same norm, and none waits


@dataclass(frozen=True)
class Direction:
    """The norm of an update, and the sketch [WIDTH] of its direction, of length one; None where nothing changed."""

    norm: float
    sketch: Tensor | None


class Sketcher:
    """Measures the updates of one layout: the same places have the same signs at every site."""

    def __init__(self, like: Tensors, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.signs = torch.randint(0, 2, (SAMPLED,), generator=draw, dtype=torch.int8).float().mul_(2).sub_(1)
        sizes = {name: tensor.numel() for name, tensor in like.items()}
        self.pieces = [(name, first) for name, size in sizes.items() for first in range(0, size, PIECE)]
        share = min(1.0, max(SAMPLED - len(self.pieces), 0) / max(sum(sizes.values()), 1))
        self.stretches: list[slice] = []  # of every piece: what is sketched
        for name, first in self.pieces:
            size = min(PIECE, sizes[name] - first)
            length = math.ceil(share * size)
            begin = int(torch.randint(0, size - length + 1, (), generator=draw))
            self.stretches.append(slice(begin, begin + length))

    def measure(self, sent: Tensors, given: Tensors) -> Direction:
        """Return how far it is from what a site was given to what it sent, and where that points.

        The norm is a finite number exactly where all numbers are finite.
        """
        direction = self._measure(sent, given, torch.float32)
        # Squares may be too large for single precision.
        return direction if math.isfinite(direction.norm) else self._measure(sent, given, torch.float64)

    def _measure(self, sent: Tensors, given: Tensors, dtype: torch.dtype) -> Direction:
        norms: list[Tensor] = []
        stream, end = torch.zeros(SAMPLED, dtype=dtype), 0
        for (name, first), stretch in zip(self.pieces, self.stretches, strict=True):
            there, here = (own[name].flatten()[first : first + PIECE].to(dtype) for own in (sent, given))
            parts = zip(there.split(SERIAL), here.split(SERIAL), strict=True)
            norms += (torch.linalg.vector_norm(part - before) for part, before in parts)
            sketched = there[stretch] - here[stretch]
            stream[end : end + len(sketched)] = sketched
            end += len(sketched)
        norm = float(torch.stack(norms).double().square().sum().sqrt()) if norms else 0.0
        sketch = stream.mul_(self.signs).view(ROWS, WIDTH).sum(0)
        length = float(sketch.norm())
        return Direction(norm, (sketch / length).float() if 0 < length < math.inf else None)


def standings(directions: Mapping[str, Direction]) -> dict[str, SentUpdate]:
    """Return how far each site's update goes, and where it points beside the others'.

    Each of the others counts as if its norm were one, so that neither a long update nor many cases make one site the
    measure of all.
    """
    known = {site: own.sketch.double() for site, own in sorted(directions.items()) if own.sketch is not None}
    found = {site: SentUpdate(norm=min(rounded(own.norm), LARGEST)) for site, own in directions.items()}
    if len(known) < 2:
        return found
    total, others = torch.stack(list(known.values())).sum(0), len(known) - 1
    for site, sketch in known.items():
        rest = total - sketch
        squared = float(rest.square().sum())  # others + the cosines of all their ordered pairs
        cosine = _cosine(float(rest @ sketch) / math.sqrt(squared)) if squared > 0 else None
        agreement = _cosine((squared - others) / (others * (others - 1))) if others > 1 else None
        found[site] = found[site].changed(cosine=cosine, agreement=agreement)
    return found


def _cosine(value: float) -> float:
    return rounded(max(-1.0, min(1.0, value)))


DIGITS = 4  # that are recorded
FAR = 1e6  # times as far as the middle one of the last round's updates: no honest training goes there
LONG, LARGE = 1e3, 1.0  # times as far as that, where it also changes weights by so much: mixtures of each site's own
STANDS_OUT = 10.0  # times as far as the middle one of the others: it is to blame where all diverge after the round
FARTHEST = 1e4  # a weight's change in a round, as the root of the mean square; before there is a last round, too


class RoundDirections:
    """The directions of one round, by site and group: of trained weights, from what a site was given to what it sent.

    It holds one sketch of 16 kB per site and group, and no model.
    """

    def __init__(
        self, groups: Groups, trained: Collection[str], seed: int, before: "RoundDirections | None" = None
    ) -> None:
        """groups: the layouts of what sites send and are given back; trained: names of weights; before: the round
        before this one."""
        chosen = {group: {n: t for n, t in own.items() if n in trained} for group, own in groups.items()}
        self._sketchers = {group: Sketcher(own, seed) for group, own in chosen.items() if own}
        self.names = {group: frozenset(own) for group, own in chosen.items()}
        self._noted: dict[str, dict[str, Direction]] = {}  # by group and site
        self._limits: dict[str, float] = {}
        for group, own in chosen.items():
            numbers = sum(tensor.numel() for tensor in own.values())
            usual = before.usual(group) if before else 0.0
            each = math.sqrt(numbers)
            of_last = min(FAR * usual, max(LONG * usual, LARGE * each)) if usual > 0 else math.inf
            self._limits[group] = min(FARTHEST * each, of_last)

    def usual(self, group: str) -> float:
        """Return how far the middle one of the updates of a group goes; 0 where there is none.

        Of two the longer, here and below: a tiny one must not make the other stand out.
        """
        return median_high([own.norm for own in self._noted.get(group, {}).values()] or [0.0])

    def measure(self, groups: Groups, given: Callable[[str], Tensors]) -> dict[str, Direction]:
        """Return the direction of every group that a site sent; the norm is finite where all its weights are."""
        return {group: own.measure(groups[group], given(group)) for group, own in self._sketchers.items()}

    def check(self, directions: Mapping[str, Direction]) -> None:
        """Raise Refused for an update that goes beyond any honest one, whoever has answered before."""
        for group, own in directions.items():
            if math.isfinite(own.norm) and own.norm > self._limits[group]:
                raise Refused(
                    f"its update of {group} has length {own.norm:.1e}, beyond any honest one "
                    f"({self._limits[group]:.1e}): the site lies, or its training diverged (lower the learning rate)"
                )

    def note(self, site: str, directions: Mapping[str, Direction]) -> None:
        """Keep the directions of a site whose answer was accepted."""
        for group, direction in directions.items():
            self._noted.setdefault(group, {})[site] = direction

    def farthest(self) -> tuple[str, float] | None:
        """Return whose update stands out most, and by how many times the middle one of the others; None if nobody's.

        Of two sites nobody can tell which one lies.
        """
        found: list[tuple[float, str]] = []
        for own in self._noted.values():
            for site, direction in own.items():
                others = [other.norm for name, other in own.items() if name != site]
                usual = median_high(others) if len(others) > 1 else math.inf
                found.append((direction.norm / usual if usual else math.inf if direction.norm else 0.0, site))
        times, site = max(found, default=(0.0, ""))
        return (site, times) if times > STANDS_OUT else None

    def updates(self) -> dict[str, dict[str, SentUpdate]]:
        """Return the record of the round, by site and group."""
        found: dict[str, dict[str, SentUpdate]] = {}
        for group, directions in self._noted.items():
            for site, update in standings(directions).items():
                found.setdefault(site, {})[group] = update
        return found


def rounded(value: float) -> float:
    """Return a number with as many digits as are recorded."""
    return float(f"{value:.{DIGITS}g}")


def changed_weights(mixers: Iterable[Aggregator | None], rounds: Sequence[Round]) -> list[list[float]] | None:
    """Return W by which sites' models are mixed, where it is another than in the rounds before."""
    found = (mixer.matrix for mixer in mixers if mixer)
    weights = next((own.double().round(decimals=4).tolist() for own in found if own is not None), None)
    return None if weights == next((line.weights for line in reversed(rounds) if line.weights), None) else weights
