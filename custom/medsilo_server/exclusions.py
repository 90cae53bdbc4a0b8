"""Undo a round after which all honest sites diverge, and repeat the round without the site whose update caused the
divergence.

An update within the limits of directions.py may still be so long that no site can train from the new mean. The repeated
round excludes the site whose update made other sites diverge. If two rounds are undone because of the same site, all
later rounds exclude this site. A study undoes at most two rounds because of one site. A study ends if too few sites
remain.
"""

from collections import Counter

from medsilo.core.errors import DIVERGED
from medsilo.exchange.channel import Missing
from medsilo_server.directions import LONG
from medsilo_server.requests import Exchange
from medsilo_server.server_state import ServerState

# Minimum number of diverged sites for which the server excludes the site that made them diverge. If fewer diverged
# sites were enough, one malicious site could exclude honest sites.
VOICES = 2
# maximum number of rounds that are undone because of one site; after this number, the site gets no more requests
MOST = 2


class Exclusions:
    def __init__(self, when_missing: str) -> None:
        # True if the plan stops the study when a site is missing, so that no site may be excluded
        self.stops = when_missing == "stop"
        self._left_out: dict[int, dict[str, Missing]] = {}
        self._times: Counter[str] = Counter()

    def away(self, number: int) -> dict[str, Missing]:
        always = "two rounds were taken back, since others diverged after this site's update; it is asked no more"
        gone = {site: Missing("refused", always) for site, times in self._times.items() if times >= MOST}
        return {**gone, **self._left_out.get(number, {})}

    def takes_back(self, number: int, exchange: Exchange, state: ServerState) -> bool:
        """Undo the previous round if the update of one site made other sites diverge. Return True if a round was
        undone.

        The suspect is the site whose update is the largest outlier. The round is undone if at least VOICES sites
        besides the suspect diverged, and if no site besides the suspect can still train. If the outlier's norm is more
        than LONG times the median norm, the round is undone if at least one other site diverged.

        Args:
            number: The index of the present round, in which sites reported that they diverged.
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
