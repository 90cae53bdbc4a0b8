"""Find out in a job's process at the server which hospitals are disconnected or silent.

The job's process asks the server's parent process, where returning_sites.py watches the hospitals' connections.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep

from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message

LOG = logging.getLogger(__name__)
CHANNEL, TOPIC, CALL, READING = "reliability", "liveness", "call", "reading"
UNHEARD = (CellCode.TIMEOUT, CellCode.COMM_ERROR, CellCode.TARGET_UNREACHABLE, CellCode.INVALID_TARGET)
EXPELLED = "the consortium expelled it"
# the first words of reasons why a job can't run at a hospital
REFUSES, WAITS = "its policies refuse the job", "its certificate ended"
UNKNOWN = "No callback is registered"  # NVFlare's reply if no function answers requests on a channel
LOOK = 1.0  # seconds between two checks of a job's hospitals
# seconds after which a hospital without a connection counts as absent; the limit is not zero, because a lost connection
# often returns soon
GRACE = 4.0
# Minimum seconds without a message after which a hospital can count as absent. A job's process at a hospital sends a
# message every ten seconds.
SILENCE = 30.0
ANSWERS = 5.0  # seconds within which a party must answer a call


@dataclass
class _Site:
    cell: str
    starts: int = 0  # number of times that the hospital's processes were restarted
    # time at which the job first received information about the hospital
    known: float = field(default_factory=monotonic)
    last_heard: float = 0.0
    longest: float = 0.0  # longest time between two messages of the hospital, in seconds
    problem: str = ""
    # the time at which the hospital's connection was closed; None while the connection is open
    closed: float | None = None
    away: tuple[float, str] | None = None  # the time at which the hospital became unable to answer, and the reason


@dataclass(eq=False)
class Liveness:
    """Finds the hospitals of a job that can't answer, because a connection is closed or a hospital is silent for too
    long.
    """

    cell: Cell
    last_heard: dict[str, float]  # time of the last message from each monitored cell
    sync: Callable[[], None]
    # Maximum seconds for which a hospital may be silent while its connection is open. The limit is shorter for a
    # hospital that has only been silent for short times so far.
    silence: float
    patience: float = math.inf  # seconds after which the job no longer waits for an absent hospital
    expelled: set[str] = field(default_factory=set)
    sites: dict[str, _Site] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Start a thread that checks the hospitals until `ended` is set."""
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()

    def wait_for_all(self, most: float, abort: Signal) -> None:
        """Wait until each hospital's process has sent a message, for at most `most` seconds."""
        began = monotonic()
        while not abort.triggered and monotonic() - began < most:
            if self.sites and all(self.last_heard.get(site.cell) for site in list(self.sites.values())):
                return
            sleep(LOOK / 10)

    def _watch(self) -> None:
        while not self.ended.wait(LOOK):
            with suppress(Exception):
                self.look()

    def look(self) -> None:
        request = new_cell_message({}, [name for name, site in self.sites.items() if self.last_heard[site.cell] > 0])
        where = {"channel": CHANNEL, "topic": TOPIC, "target": FQCN.ROOT_SERVER}
        reply = self.cell.send_request(**where, request=request, timeout=5.0, optional=True)
        if reply.get_header(MessageHeaderKey.RETURN_CODE) != CellCode.OK:
            if UNKNOWN in str(reply.get_header(MessageHeaderKey.ERROR)):
                # the server's startup kit lacks the component returning_sites, and each further check would cause a
                # warning in NVFlare's log
                self.ended.set()
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
            site.last_heard = now  # the hospital's silence is measured from this moment on
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
        (self.expelled.add if problem == EXPELLED else self.expelled.discard)(site.cell)
        if problem:
            site.away = (site.away[0] if site.away else now), problem

    def away(self) -> dict[str, str]:
        return self.hopeless() | {name: site.away[1] for name, site in list(self.sites.items()) if site.away}

    def left_behind(self, many: int, least: int) -> dict[str, str]:
        """Return the sites for which a round of the job need not wait, each with the reason.

        If enough sites are present, the round waits for no site that is absent.

        Args:
            least: The minimum number of sites in the round.
        """
        away = self.away()
        return away if many - len(away) >= least else self.hopeless()

    def hopeless(self) -> dict[str, str]:
        """Return the absent sites for which the job no longer waits, each with the reason.

        The job does not wait for a site that has been absent for too long, or that can't return until a person acts.
        """
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
        """Return the sites that can't answer at present, each with the reason and the seconds since the absence
        began.
        """
        away = {name: site.away for name, site in list(self.sites.items()) if site.away}
        return {name: f"{why} ({monotonic() - since:.0f} s ago)" for name, (since, why) in away.items()}


@dataclass(eq=False)
class Silent:
    """Calls the other parties to find out which of them have stopped.

    The connection of a stopped party may stay open for a long time.
    """

    cell: Cell
    deaf: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)

    def listen(self) -> None:
        self.cell.register_request_cb(channel=CHANNEL, topic=CALL, cb=lambda _: make_reply(CellCode.OK))

    def call(self, cells: Mapping[str, str]) -> None:
        """Call several parties without waiting for their answers. A party that does not answer in time is added to
        `deaf`.
        """
        self.deaf &= cells.keys()
        for name in cells.keys() - self.called:
            self.called.add(name)
            threading.Thread(target=self._call, args=(name, cells[name]), daemon=True).start()

    def _call(self, name: str, cell: str) -> None:
        where, began = {"channel": CHANNEL, "topic": CALL, "target": cell}, monotonic()
        try:
            reply = self.cell.send_request(**where, request=new_cell_message({}), timeout=ANSWERS, optional=True)
            if reply.get_header(MessageHeaderKey.RETURN_CODE) not in UNHEARD:
                self.deaf.discard(name)
            # if the call took twice its time limit, this process itself was suspended, so the missing answer does not
            # show that the party has stopped
            elif monotonic() - began < 2 * ANSWERS:
                self.deaf.add(name)
        finally:
            self.called.discard(name)
