"""Rounds that are taken back: where all honest sites diverge after one, it is repeated without whose update stood out.

An update within the bounds of directions.py may still be so long that nobody can train from the mean. A site is left
out of the round that is repeated, and of all others when it comes to that again: a study takes back two rounds for each
site at most, and ends, as without this, where too few are left.
"""

from collections import Counter

from medsilo.core.errors import DIVERGED
from medsilo.federation.channel import Missing
from medsilo.federation.directions import LONG
from medsilo.federation.requests import Exchange
from medsilo.federation.server_state import ServerState

VOICES = 2  # that say so: one alone, whose own update was tiny, would have an honest one left out
MOST = 2  # rounds that are taken back because of one site, which is asked no more then


class Exclusions:
    """The sites that are left out of rounds, and why."""

    def __init__(self, when_missing: str) -> None:
        self.stops = when_missing == "stop"  # where one is missing, and so it may leave out nobody
        self._left_out: dict[int, dict[str, Missing]] = {}
        self._times: Counter[str] = Counter()

    def away(self, number: int) -> dict[str, Missing]:
        """Return the sites that are not asked in a round."""
        always = "two rounds were taken back, since others diverged after this site's update; it is asked no more"
        gone = {site: Missing("refused", always) for site, times in self._times.items() if times >= MOST}
        return {**gone, **self._left_out.get(number, {})}

    def takes_back(self, number: int, exchange: Exchange, state: ServerState) -> bool:
        """Return whether the round before this one is undone, and is to be repeated: nobody but the site whose update
        stood out in it can train any more, or it stood out beyond any honest one and too few others can."""
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
