"""The sites' turns in what is asked of all: for people who watch. No decision of the study depends on it."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from medsilo.federation.seams import Channel, Missing, Outgoing, Receive
from medsilo.runs.messages import Parcel
from medsilo.runs.schema import SiteTurn, Turns

Tell = Callable[[Turns | None], None]
PAUSE = 0.001  # seconds for each site between two words, so that many sites cost no more than few


class TurnKeeper:
    """A channel that knows who has been asked and who has answered, tells it at every change, and counts bytes.

    Several threads may call it.
    """

    def __init__(
        self, inner: Channel, tell: Tell = lambda turns: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner, self._tell, self._clock = inner, tell, clock
        self.bytes_down: dict[str, int] = {}  # of tensors, by site, since the last question began
        self.bytes_up: dict[str, int] = {}
        self._changing = threading.Lock()
        self._what = ("", 0)
        self._asked: dict[str, float | None] = {}
        self._answered: dict[str, float] = {}
        self._told = -1.0

    def pause(self, seconds: float) -> None:
        self.inner.pause(seconds)

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        def going(site: str) -> Parcel:
            parcel = outgoing(site)
            self.bytes_down[site] = parcel.size()
            self.asked(site)
            return parcel

        def coming(site: str, reply: Parcel) -> None:
            receive(site, reply)  # raises where these are no tensors
            self.bytes_up[site] = reply.size()
            self.answered(site)

        return self.inner.ask(sites, going, coming, timeout)

    def begin(self, task: str, number: int, sites: Sequence[str]) -> None:
        """Begin to ask these sites; all of them wait."""
        with self._changing:
            self._what, self._asked, self._answered = (task, number), dict.fromkeys(sites), {}
            self.bytes_down, self.bytes_up = {}, {}
            self._say(now=True)

    def asked(self, site: str) -> None:
        """A site has its question."""
        with self._changing:
            self._asked[site] = self._clock()
            self._answered.pop(site, None)
            self._say()

    def answered(self, site: str) -> None:
        """A site's answer is here."""
        with self._changing:
            self._answered[site] = self._clock() - (self._asked.get(site) or self._clock())
            self._say()

    def end(self) -> None:
        """Nobody is asked any more."""
        with self._changing:
            self._what, self._asked, self._answered = ("", 0), {}, {}
            self._tell(None)

    def now(self) -> Turns | None:
        """Return who has been asked and who has answered; None before the first question and after the last."""
        with self._changing:
            return self._turns() if self._what[0] else None

    def _say(self, now: bool = False) -> None:
        if now or self._clock() - self._told >= PAUSE * len(self._asked):
            self._tell(self._turns())
            self._told = self._clock()

    def _turns(self) -> Turns:
        now = self._clock()
        sites = {
            site: SiteTurn(asked=None if since is None else now - since, answered=self._answered.get(site))
            for site, since in self._asked.items()
        }
        return Turns(task=self._what[0], round=self._what[1], at=time.time(), sites=sites)
