"""Undo a round if all honest sites diverge after it, and repeat it without the site whose update was an outlier.

An update within the limits of directions.py may still be so long that no site can train from the mean. Its site is left
out of the repeated round, and of all later rounds if this happens again. A study undoes at most two rounds because of
each site, and ends if too few sites are left.
"""

from collections import Counter

from medsilo.core.errors import DIVERGED
from medsilo.exchange.channel import Missing
from medsilo_server.directions import LONG
from medsilo_server.requests import Exchange
from medsilo_server.server_state import ServerState

# Minimum number of sites that must diverge. A single site with a tiny update could otherwise exclude an honest site.
VOICES = 2
MOST = 2  # number of undone rounds after which their site gets no more requests


class Exclusions:
    """The sites that are left out of rounds, with the reasons."""

    def __init__(self, when_missing: str) -> None:
        self.stops = when_missing == "stop"  # The plan stops when a site is missing, so no site may be left out.
        self._left_out: dict[int, dict[str, Missing]] = {}
        self._times: Counter[str] = Counter()

    def away(self, number: int) -> dict[str, Missing]:
        """Return the sites that are left out of a round."""
        always = "two rounds were taken back, since others diverged after this site's update; it is asked no more"
        gone = {site: Missing("refused", always) for site, times in self._times.items() if times >= MOST}
        return {**gone, **self._left_out.get(number, {})}

    def takes_back(self, number: int, exchange: Exchange, state: ServerState) -> bool:
        """Undo the previous round if its outlier is the cause of divergence; return True if the round was undone.

        A round is undone if no site except the outlier's site can still train. A round is also undone if the update was
        far longer than any honest update and too few other sites can train.
        """
        diverged = {site for site, gone in exchange.missing.items() if DIVERGED in gone.reason}
        others = {site for site in exchange.asked if site not in diverged and site not in exchange.by_kind("lost")}
        if self.stops or state.suspect is None:
            return False
        suspect, times = state.suspect
        voices = len(diverged - {suspect})
        if not (voices and times > LONG) and (voices < VOICES or others - {suspect}):
            return False
        if not state.take_back():
            return False
        undone = number - 1
        reason = (
            f"round {undone} was taken back and repeated without this site: {voices} others diverged after it, and its "
            f"update was {times:.3g} times as long as theirs"
        )
        self._left_out.setdefault(undone, {})[suspect] = Missing("refused", reason)
        self._times[suspect] += 1
        return True
