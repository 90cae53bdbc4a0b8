"""Record the norm and the direction of each site's update in a round. No update is kept in memory.

The norm is exact. The direction is a count sketch of the update (Charikar et al. 2002; Weinberger et al. 2009). A count
sketch multiplies each value by a random sign, which depends on the value's position, and adds the product to one of
WIDTH buckets. On average, the cosine of two sketches equals the cosine of the two updates. The standard deviation of
the sketches' cosine is at most about 1 / √WIDTH, or 1.6 %.

For a large model, only about SAMPLED values of an update enter the sketch. The sampled values come from random slices,
which change in every round.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

import torch
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups, Tensors
from medsilo.mixing.aggregators import Aggregator
from medsilo.runs.fields import LARGEST
from medsilo.runs.rounds import Round, SentUpdate

WIDTH = 4093  # number of buckets; the number is prime, so that the values of one matrix column get different buckets
ROWS = 16
SAMPLED = ROWS * WIDTH
PIECE = 1 << 18
# PyTorch sums this number of values in one thread, so a norm does not depend on the number of threads
SERIAL = 16 << 10


@dataclass(frozen=True)
class Direction:
    """The norm of an update, and a sketch of the update's direction.

    The sketch has WIDTH values and the norm 1. An update of norm 0 has no sketch.
    """

    norm: float
    sketch: Tensor | None
    start: float = 0.0  # norm of the weights before the update, if this norm limits the norm of the update; otherwise 0


class Sketcher:
    """Computes the norms and the sketches of updates. The tensors of all updates have the same names and shapes.

    All updates in a round are multiplied by the same random signs, so that their sketches are comparable.
    """

    def __init__(self, like: Tensors, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.signs = torch.randint(0, 2, (SAMPLED,), generator=draw, dtype=torch.int8).float().mul_(2).sub_(1)
        sizes = {name: tensor.numel() for name, tensor in like.items()}
        self.pieces = [(name, first) for name, size in sizes.items() for first in range(0, size, PIECE)]
        share = min(1.0, max(SAMPLED - len(self.pieces), 0) / max(sum(sizes.values()), 1))
        self.stretches: list[slice] = []
        for name, first in self.pieces:
            size = min(PIECE, sizes[name] - first)
            length = math.ceil(share * size)
            begin = int(torch.randint(0, size - length + 1, (), generator=draw))
            self.stretches.append(slice(begin, begin + length))

    def measure(self, sent: Tensors, tensors: Tensors) -> Direction:
        """Return the norm and the direction of an update. The norm is finite if and only if all values are finite.

        Args:
            sent: The tensors that the site sent.
            tensors: The tensors that the site had received.
        """
        direction = self._measure(sent, tensors, torch.float32)
        # the squares of finite values may overflow in single precision, so the norm is computed again in double
        # precision
        return direction if math.isfinite(direction.norm) else self._measure(sent, tensors, torch.float64)

    def _measure(self, sent: Tensors, tensors: Tensors, dtype: torch.dtype) -> Direction:
        norms: list[Tensor] = []
        stream, end = torch.zeros(SAMPLED, dtype=dtype), 0
        for (name, first), stretch in zip(self.pieces, self.stretches, strict=True):
            there, here = (own[name].flatten()[first : first + PIECE].to(dtype) for own in (sent, tensors))
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
    """Return the norm of each site's update, and the cosine between the update and the mean of the other updates.

    Each update is normalised before the mean is computed, so that neither a long update nor a large site dominates the
    mean.
    """
    known = {
        site: direction.sketch.double()
        for site, direction in sorted(directions.items())
        if direction.sketch is not None
    }
    found = {site: SentUpdate(norm=min(rounded(own.norm), LARGEST)) for site, own in directions.items()}
    if len(known) < 2:
        return found
    total, others = torch.stack(list(known.values())).sum(0), len(known) - 1
    for site, sketch in known.items():
        rest = total - sketch
        # `squared` is the number of other sites, plus the sum of the cosines between all ordered pairs of other sites
        squared = float(rest.square().sum())
        cosine = _cosine(float(rest @ sketch) / math.sqrt(squared)) if squared > 0 else None
        agreement = _cosine((squared - others) / (others * (others - 1))) if others > 1 else None
        found[site] = found[site].changed(cosine=cosine, agreement=agreement)
    return found


def _cosine(value: float) -> float:
    return rounded(max(-1.0, min(1.0, value)))


DIGITS = 4
# An update is rejected if its norm is more than this number of times the last round's median norm. In honest training,
# no norm of an update is more than this number of times the median norm.
FAR = 1e6
# An update is also rejected if its norm is more than LONG times the last round's median norm. The limit LONG applies
# only to an update whose values have a root mean square above LARGE.
LONG, LARGE = 1e3, 1.0
# If sites diverge, the server blames an update whose norm is more than this number of times the median norm of the
# other updates.
STANDS_OUT = 10.0
START = 20.0  # maximum norm of a training script's first update, as a multiple of the norm of the initial weights
FARTHEST = 1e4  # maximum root mean square change of the weights in a round, even in the first round


class RoundDirections:
    """Records the directions of all updates of trained weights in a round, by group and site.

    A direction takes 16 kB of memory, and updates are not kept in memory.
    """

    def __init__(
        self,
        groups: Groups,
        trained: Collection[str],
        seed: int,
        before: "RoundDirections | None" = None,
        from_start: bool = False,
    ) -> None:
        """Set the limits for the updates of one round.

        Args:
            groups: Tensors with the names and shapes of the tensors that sites both receive and send, by group.
            seed: The seed of the sketches' random signs.
            from_start: True if the norm of an update is limited by the norm of the received weights.
        """
        chosen = {group: {n: t for n, t in own.items() if n in trained} for group, own in groups.items()}
        self._sketchers = {group: Sketcher(own, seed) for group, own in chosen.items() if own}
        self.names = {group: frozenset(own) for group, own in chosen.items()}
        self._noted: dict[str, dict[str, Direction]] = {}
        self._limits: dict[str, float] = {}
        self._from_start: set[str] = set()
        for group, own in chosen.items():
            numbers = sum(tensor.numel() for tensor in own.values())
            usual = before.usual(group) if before else 0.0
            each = math.sqrt(numbers)
            if from_start:
                self._from_start.add(group)
            of_last = min(FAR * usual, max(LONG * usual, LARGE * each)) if usual > 0 else math.inf
            self._limits[group] = min(FARTHEST * each, of_last)

    def usual(self, group: str) -> float:
        """Return the median norm of all updates of a group, or 0 if there are no updates.

        For an even number of updates, the median is the larger of the two middle values. If the median were the mean of
        the two middle values, one tiny update could make another update an outlier.
        """
        return median_high([own.norm for own in self._noted.get(group, {}).values()] or [0.0])

    def measure(self, groups: Groups, tensors_of: Callable[[str], Tensors]) -> dict[str, Direction]:
        """Return the direction of a site's update, for each group.

        A group's norm is finite if and only if all trained weights of the group are finite.

        Args:
            tensors_of: Returns the tensors of a group that the site had received.
        """
        found = {
            group: sketcher.measure(groups[group], tensors_of(group)) for group, sketcher in self._sketchers.items()
        }
        for group in self._from_start & found.keys():
            found[group] = replace(found[group], start=length_of(tensors_of(group), self.names[group]))
        return found

    def check(self, directions: Mapping[str, Direction]) -> None:
        """Raise Refused if the norm of an update exceeds its limit.

        The limit of an update does not depend on the answers of other sites in the same round.
        """
        for group, direction in directions.items():
            limit = min(self._limits[group], START * direction.start if direction.start else math.inf)
            if math.isfinite(direction.norm) and direction.norm > limit:
                raise Refused(
                    f"its update of {group} has norm {direction.norm:.1e}, beyond any honest one ({limit:.1e}): the "
                    "site manipulated it, or training diverged (lower the learning rate)"
                )

    def note(self, site: str, directions: Mapping[str, Direction]) -> None:
        for group, direction in directions.items():
            self._noted.setdefault(group, {})[site] = direction

    def farthest(self) -> tuple[str, float] | None:
        """Return the site whose update is the largest outlier, and the size of this outlier.

        The size of an outlier is the norm of the update, divided by the median norm of the other sites' updates. Return
        None if no update is an outlier, or if there are fewer than three sites.
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
        """Return the norm and the cosines of each update in the round, by site and group."""
        found: dict[str, dict[str, SentUpdate]] = {}
        for group, directions in self._noted.items():
            for site, update in standings(directions).items():
                found.setdefault(site, {})[group] = update
        return found


def length_of(tensors: Tensors, names: Collection[str]) -> float:
    squares = [
        torch.linalg.vector_norm(tensor.float()).double().square() for name, tensor in tensors.items() if name in names
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def changed_weights(aggregators: Iterable[Aggregator | None], rounds: Sequence[Round]) -> list[list[float]] | None:
    """Return a matrix of weights: how much each site's model counts in the mixture that each site receives.

    Return None if no aggregator has a matrix of weights, or if the matrix has not changed since it was last recorded.
    """
    found = (aggregator.matrix for aggregator in aggregators if aggregator)
    weights = next((own.double().round(decimals=4).tolist() for own in found if own is not None), None)
    return None if weights == next((line.weights for line in reversed(rounds) if line.weights), None) else weights
