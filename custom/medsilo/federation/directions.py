"""Record what shows of every site's updates in a round: how far they go, and where they point beside the others'."""

from collections.abc import Callable, Collection, Mapping

from medsilo.core.tensors import Groups, Tensors
from medsilo.mixing.layout import Layout
from medsilo.mixing.updates import Direction, Sketcher, standings
from medsilo.runs.schema import LARGEST, SentUpdate

DIGITS = 4  # that are recorded


class RoundDirections:
    """The directions of one round, by site and group: of trained weights, from what a site was given to what it sent.

    It holds one sketch of 16 kB per site and group, and no model.
    """

    def __init__(self, groups: Groups, trained: Collection[str], seed: int) -> None:
        """groups: the layouts of what sites send and are given back; trained: names of weights."""
        chosen = {group: {n: t for n, t in own.items() if n in trained} for group, own in groups.items()}
        self._sketchers = {group: Sketcher(Layout(own), seed) for group, own in chosen.items() if own}
        self.names = {group: frozenset(own) for group, own in chosen.items()}
        self._noted: dict[str, dict[str, Direction]] = {}  # by group and site

    def measure(self, groups: Groups, given: Callable[[str], Tensors]) -> dict[str, Direction]:
        """Return the direction of every group that a site sent; the norm is finite where all its weights are."""
        return {group: own.measure(groups[group], given(group)) for group, own in self._sketchers.items()}

    def note(self, site: str, directions: Mapping[str, Direction]) -> None:
        """Keep the directions of a site whose answer was accepted."""
        for group, direction in directions.items():
            self._noted.setdefault(group, {})[site] = direction

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
