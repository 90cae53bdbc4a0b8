"""Write events about hospitals that answer slowly to the events.log of the server's startup kit."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from medsilo.flare.study_events import StudyEvents
from medsilo.runs.progress import late_after
from medsilo.runs.rounds import RequestStatus, Round

MARGIN = 30.0  # a site is slow if its answer takes this number of seconds longer than usual


@dataclass
class SlowSites:
    """Writes an event when a site is slow to answer a request, and another event when the slow site has answered."""

    events: StudyEvents
    slow: dict[str, str] = field(default_factory=dict)

    def look(self, turns: RequestStatus | None, rounds: Iterable[Round]) -> None:
        """Compare the time that each site needs for its answer with the site's times in earlier rounds.

        In the first round, a site's time is compared with the times of the other sites.

        Args:
            turns: The state of the current request, or None between requests.
        """
        if turns is None:
            return
        question = f"round {turns.round}" if turns.task == "round" else turns.task
        self.slow = {site: asked for site, asked in self.slow.items() if asked == question}
        known = list(rounds)
        for site, turn in turns.sites.items():
            usual = late_after(site, known, turns)
            if turn.answered is not None and self.slow.pop(site, ""):
                self.events.tell("slow", f"{question}: answered after {turn.answered:.0f} s", site)
            elif turn.answered is None and usual and site not in self.slow and (turn.asked or 0.0) > usual + MARGIN:
                self.slow[site] = question
                told = f"{question}: no answer for {turn.asked:.0f} s; it takes {usual:.0f} s at most"
                self.events.tell("slow", told, site, needs_somebody=True)
