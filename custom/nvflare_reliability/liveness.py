"""The hospitals of a job that are there: the server's own process sees connections and tokens, and its jobs ask it.

A hospital whose processes died comes back with a new token, of which NVFlare tells no job. Here it is taken into the
jobs that run: its process is started there again, and goes on from the hospital's own state.
"""

import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN, FqcnInfo
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message

from nvflare_reliability.errors import one_line
from nvflare_reliability.patches import death_of_job, start_again, wait_no_more

LOG = logging.getLogger(__name__)
CHANNEL, TOPIC = "reliability", "liveness"
LOOK = 1.0  # seconds between two looks of a job
GRACE = 4.0  # seconds without connection and word until a hospital is away: a connection that broke is often made again
SILENCE = 30.0  # seconds that every hospital may say nothing: the process of a job says something every ten
TRIES = 6  # to start a job's process at a hospital, each after twice the pause; all take about a minute
MOST_DEATHS = 5  # of a job's process at one hospital within WITHIN seconds; after one more it is not started again
WITHIN = 3600.0


# ---------------------------------------------------------------------------------------------------- the server's own
@dataclass
class _Job:
    """A job, as the server's own process knows it."""

    seen: set[str] = field(default_factory=set)  # cells of hospitals that were connected
    heard: set[str] = field(default_factory=set)  # hospitals whose process the job has heard
    starts: dict[str, int] = field(default_factory=dict)  # by hospital: how often it came back with a new token
    deaths: dict[str, list[float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # why a hospital can't be taken in again


class ReturningSites(FLComponent):
    """Takes hospitals that come back into the jobs that run, and tells these jobs who is connected.

    It does so for the jobs that ask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, _Job] = {}
        self.engine: Any = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self.engine = fl_ctx.get_engine()
            self.engine.get_cell().register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._asked)
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED and self.engine:
            self._look(fl_ctx)

    def _asked(self, request: Message) -> Message:
        """Tell a job of its hospitals."""
        origin, told = str(request.get_header(MessageHeaderKey.ORIGIN)), request.payload
        job_id = origin.rpartition(".")[2]
        running = self.engine.run_processes.get(job_id)
        if not FqcnInfo(origin).is_on_server or running is None or not isinstance(told, list):
            return make_reply(CellCode.INVALID_REQUEST)
        if not self.jobs:  # by now NVFlare has registered its own
            where = {"channel": CellChannel.SERVER_MAIN, "topic": CellChannelTopic.REPORT_JOB_FAILURE}
            self.engine.get_cell().register_request_cb(**where, cb=self._process_ended)
        job = self.jobs.setdefault(job_id, _Job())
        job.heard = set(told)
        hospitals = {
            client.name: {
                "cell": client.get_fqcn(),
                "closed": self._is_closed(job, client.get_fqcn(), job_id),
                "starts": job.starts.get(client.name, 0),
                "problem": job.problems.get(client.name, ""),
            }
            for client in running[RunProcessKey.PARTICIPANTS].values()
        }
        return make_reply(CellCode.OK, body=hospitals)

    def _is_closed(self, job: _Job, cell: str, job_id: str) -> bool:
        """Return whether a connection is gone that a hospital or its job's process had; behind a relay it has none."""
        cells = {cell, FQCN.join([cell, job_id])}
        connected = {name for name in cells if self.engine.get_cell().is_cell_connected(name)}
        job.seen |= connected
        return not cells & job.seen <= connected

    def _look(self, fl_ctx: FLContext) -> None:
        """Take in who came back, and let go of who can't tell any more how its process has ended."""
        here = {client.name: client for client in self.engine.get_clients()}
        for job_id in list(self.jobs):
            running = self.engine.run_processes.get(job_id)
            if running is None:
                self._let_go(job_id, fl_ctx)
                continue
            job, known = self.jobs[job_id], running[RunProcessKey.PARTICIPANTS]
            new = [here[old.name] for old in known.values() if here.get(old.name, old).token != old.token]
            if not new:
                continue
            names = {client.name for client in new}
            stayed = {token: client for token, client in known.items() if client.name not in names}
            running[RunProcessKey.PARTICIPANTS] = {**stayed, **{client.token: client for client in new}}
            for client in new:
                job.starts[client.name] = job.starts.get(client.name, 0) + 1
                job.deaths.pop(client.name, None)
                self._take_in(job_id, client)

    def _let_go(self, job_id: str, fl_ctx: FLContext) -> None:
        """Do not wait for the word of hospitals that are not there, when a job has ended."""
        job, cell = self.jobs[job_id], self.engine.get_cell()
        # a hospital's cell has its name, unless it is behind a relay
        gone = {name for name in job.heard & job.seen if not cell.is_cell_connected(name)}
        if not wait_no_more(fl_ctx, job_id, gone):
            del self.jobs[job_id]

    def _process_ended(self, request: Message) -> Message:
        """Take a hospital's word that a job's process has ended there; one that died is started again."""
        token, job_id = death_of_job(request)
        client, job = self.engine.client_manager.clients.get(token), self.jobs.get(job_id)
        if client and job and job_id in self.engine.run_processes and client.name in job.heard:
            deaths = [then for then in job.deaths.get(client.name, []) if monotonic() - then < WITHIN]
            job.deaths[client.name] = [*deaths, monotonic()]
            if len(deaths) < MOST_DEATHS:
                self._take_in(job_id, client)
            else:
                job.problems[client.name] = f"the job's process died there {MOST_DEATHS + 1} times within an hour"
            return make_reply(CellCode.OK)
        return self.engine.server.process_job_failure(request)

    def _take_in(self, job_id: str, client: Client) -> None:
        self.jobs[job_id].problems.pop(client.name, None)
        threading.Thread(target=self._start, args=(job_id, client), daemon=True).start()

    def _start(self, job_id: str, client: Client) -> None:
        """Start a job's process at a hospital."""
        job, why = self.jobs[job_id], ""
        for attempt in range(TRIES):
            threading.Event().wait(LOOK * 2**attempt)
            if client.token not in self.engine.client_manager.clients or job_id not in self.engine.run_processes:
                return
            try:
                with self.engine.new_context() as fl_ctx:
                    why = start_again(fl_ctx, job_id, client)
            except Exception as error:
                why = type(error).__name__
                LOG.exception("while job %s was started again at %s", job_id, client.name)
            if not why:
                LOG.info("%s takes part in job %s again", client.name, job_id)
                return
        job.problems[client.name] = f"it is back and can't take part: {one_line(why, 300)}"
        LOG.error("%s, job %s: %s", client.name, job_id, job.problems[client.name])


# ---------------------------------------------------------------------------------------------------- a job
@dataclass
class _Site:
    """A hospital's processes, as a job knows them."""

    cell: str
    starts: int = 0
    known: float = field(default_factory=monotonic)  # since when the job asks for it
    heard: float = 0.0
    longest: float = 0.0  # silence after which it was heard again
    problem: str = ""  # that keeps it away until somebody there mends it
    closed: float | None = None  # since when a connection is gone
    away: tuple[float, str] | None = None  # since when it can't answer, and why


@dataclass(eq=False)
class Liveness:
    """The hospitals of a job that can't answer, as the server's own process and their silence tell."""

    cell: Cell
    heard: dict[str, float]  # by cell of a hospital that is asked for, when it was heard last
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
            if self.sites and all(self.heard.get(site.cell) for site in list(self.sites.values())):
                return
            sleep(LOOK / 10)

    def _watch(self) -> None:
        while not self.ended.wait(LOOK):
            with suppress(Exception):  # one look that fails is made good by the next
                self.look()

    def look(self) -> None:
        """Ask the server's own process."""
        request = new_cell_message({}, [name for name, site in self.sites.items() if self.heard[site.cell] > 0])
        where = {"channel": CHANNEL, "topic": TOPIC, "target": FQCN.ROOT_SERVER}
        reply = self.cell.send_request(**where, request=request, timeout=5.0, optional=True)
        if reply.get_header(MessageHeaderKey.RETURN_CODE) != CellCode.OK:
            return  # it has no such component
        for name, told in reply.payload.items():
            self._learn(name, **told)

    def _learn(self, name: str, cell: str, closed: bool, starts: int, problem: str) -> None:
        site, now = self.sites.setdefault(name, _Site(cell)), monotonic()
        heard = self.heard.setdefault(site.cell, 0.0)
        came_back = starts != site.starts
        if came_back:
            self.sync()
            site.starts, site.away = starts, (now, "its processes were started again")
        site.closed = (site.closed or now) if closed else None
        bearable = min(self.silence, max(SILENCE, 2 * site.longest))
        gone = now - max(site.closed, heard) > GRACE if site.closed else now - heard > bearable
        if closed or came_back:
            site.heard = now  # what follows is no silence of its line
        elif heard > site.heard:
            site.longest = max(site.longest, heard - site.heard if site.heard else 0.0)
            site.heard = heard
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
            if not self.heard.get(site.cell):
                since, why = site.known, "its process of the job gave no sign of life"
            if site.problem:
                found[name] = site.problem
            elif now - since > self.patience:
                found[name] = f"{why} ({now - since:.0f} s ago)"
        return found

    def told(self) -> dict[str, str]:
        """Return who can't answer now, why and since when."""
        away = {name: site.away for name, site in list(self.sites.items()) if site.away}
        return {name: f"{why} ({monotonic() - since:.0f} s ago)" for name, (since, why) in away.items()}
