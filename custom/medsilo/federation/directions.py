"""Record what shows of every site's updates in a round: how far they go, and where they point beside the others'."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median_high

from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups, Tensors
from medsilo.mixing.layout import Layout
from medsilo.mixing.mixers import Mixer, SimilarityMix
from medsilo.mixing.updates import Direction, Sketcher, standings
from medsilo.runs.schema import LARGEST, Round, SentUpdate

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
        self._sketchers = {group: Sketcher(Layout(own), seed) for group, own in chosen.items() if own}
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
                    f"its update of {group} is {own.norm:.1e} long, beyond any honest one ({self._limits[group]:.1e}): "
                    "it lies, or training diverged there; then lower the learning rate"
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
            for site, own in standings(directions).items():
                norm = min(rounded(directions[site].norm), LARGEST)
                update = SentUpdate(norm=norm, cosine=_short(own.cosine), agreement=_short(own.agreement))
                found.setdefault(site, {})[group] = update
        return found


def _short(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def rounded(value: float) -> float:
    """Return a number with as many digits as are recorded."""
    return float(f"{value:.{DIGITS}g}")


def changed_weights(mixers: Iterable[Mixer | None], rounds: Sequence[Round]) -> list[list[float]] | None:
    """Return W by which sites' models are mixed, where it is another than in the rounds before."""
    found = (mixer.weights for mixer in mixers if isinstance(mixer, SimilarityMix))
    weights = next((own.double().round(decimals=4).tolist() for own in found if isinstance(own, Tensor)), None)
    return None if weights == next((line.weights for line in reversed(rounds) if line.weights), None) else weights
