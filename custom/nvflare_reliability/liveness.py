"""The hospitals of a job that are there, as the job asks the server's own process (returning_sites.py)."""

import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep

from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import new_cell_message

LOG = logging.getLogger(__name__)
CHANNEL, TOPIC = "reliability", "liveness"
UNKNOWN = "No callback is registered"  # what NVFlare says of a channel without a listener
LOOK = 1.0  # seconds between two looks of a job
GRACE = 4.0  # seconds without connection and word until a hospital is away: a connection that broke is often made again
SILENCE = 30.0  # seconds that every hospital may say nothing: the process of a job says something every ten


@dataclass
class _Site:
    """A hospital's processes, as a job knows them."""

    cell: str
    starts: int = 0
    known: float = field(default_factory=monotonic)  # since when the job asks for it
    last_heard: float = 0.0
    longest: float = 0.0  # silence after which it was heard again
    problem: str = ""  # that keeps it away until somebody there mends it
    closed: float | None = None  # since when a connection is gone
    away: tuple[float, str] | None = None  # since when it can't answer, and why


@dataclass(eq=False)
class Liveness:
    """The hospitals of a job that can't answer, as the server's own process and their silence tell."""

    cell: Cell
    last_heard: dict[str, float]  # by cell of a hospital that is asked for, when it was heard last
    sync: Callable[[], None]  # learns who has new tokens
    silence: float  # seconds that one with an open connection may say nothing; fewer, while its silences were short
    patience: float = math.inf  # seconds after which nobody waits any more for one that is away
    sites: dict[str, _Site] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Look from now on, until `ended` is set."""
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()

    def wait_for_all(self, most: float, abort: Signal) -> None:
        """Wait until the process of each hospital was heard, for so many seconds at most."""
        began = monotonic()
        while not abort.triggered and monotonic() - began < most:
            if self.sites and all(self.last_heard.get(site.cell) for site in list(self.sites.values())):
                return
            sleep(LOOK / 10)

    def _watch(self) -> None:
        while not self.ended.wait(LOOK):
            with suppress(Exception):  # one look that fails is made good by the next
                self.look()

    def look(self) -> None:
        """Ask the server's own process."""
        request = new_cell_message({}, [name for name, site in self.sites.items() if self.last_heard[site.cell] > 0])
        where = {"channel": CHANNEL, "topic": TOPIC, "target": FQCN.ROOT_SERVER}
        reply = self.cell.send_request(**where, request=request, timeout=5.0, optional=True)
        if reply.get_header(MessageHeaderKey.RETURN_CODE) != CellCode.OK:
            if UNKNOWN in str(reply.get_header(MessageHeaderKey.ERROR)):
                self.ended.set()  # a kit without such a component, whose logs get a warning for each look
            return
        for name, told in reply.payload.items():
            self._learn(name, **told)

    def _learn(self, name: str, cell: str, closed: bool, starts: int, problem: str) -> None:
        site, now = self.sites.setdefault(name, _Site(cell)), monotonic()
        heard = self.last_heard.setdefault(site.cell, 0.0)
        came_back = starts != site.starts
        if came_back:
            self.sync()
            site.starts, site.away = starts, (now, "its processes were started again")
        site.closed = (site.closed or now) if closed else None
        bearable = min(self.silence, max(SILENCE, 2 * site.longest))
        gone = now - max(site.closed, heard) > GRACE if site.closed else now - heard > bearable
        if closed or came_back:
            site.last_heard = now  # what follows is no silence of its line
        elif heard > site.last_heard:
            site.longest = max(site.longest, heard - site.last_heard if site.last_heard else 0.0)
            site.last_heard = heard
        if site.away and heard > site.away[0] and not closed:
            LOG.info("%s is back after %.0f s", name, heard - site.away[0])
            site.away = None
        elif not site.away and heard and gone:
            site.away = now, "its connection was closed" if closed else f"it was silent for {bearable:.0f} s"
            LOG.warning("%s can't answer: %s", name, site.away[1])
        site.problem = problem
        if problem:
            site.away = (site.away[0] if site.away else now), problem

    def away(self) -> dict[str, str]:
        """Return who can't answer now, and why."""
        return self.hopeless() | {name: site.away[1] for name, site in list(self.sites.items()) if site.away}

    def left_behind(self, many: int, least: int) -> dict[str, str]:
        """Return whom a round of so many does not wait for: who can't answer now, while enough others are there."""
        away = self.away()
        return away if many - len(away) >= least else self.hopeless()

    def hopeless(self) -> dict[str, str]:
        """Return for whom nobody waits any more, and why: it needs somebody there, or has been away for too long."""
        found, now = {}, monotonic()
        for name, site in list(self.sites.items()):
            since, why = site.away or (now, "")
            if not self.last_heard.get(site.cell):
                since, why = site.known, "its process of the job gave no sign of life"
            if site.problem:
                found[name] = site.problem
            elif now - since > self.patience:
                found[name] = f"{why} ({now - since:.0f} s ago)"
        return found

    def absences(self) -> dict[str, str]:
        """Return who can't answer now, why and since when."""
        away = {name: site.away for name, site in list(self.sites.items()) if site.away}
        return {name: f"{why} ({monotonic() - since:.0f} s ago)" for name, (since, why) in away.items()}
