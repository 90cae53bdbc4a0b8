"""The server's own process sees connections and tokens, and its jobs ask it (liveness.py).

A hospital whose processes died comes back with a new token, of which NVFlare tells no job. Here it is taken into the
jobs that run: its process is started there again, and goes on from the hospital's own state.
"""

import logging
import threading
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN, FqcnInfo
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

from nvflare_reliability.errors import one_line
from nvflare_reliability.kit_patches import death_of_job, start_again, wait_no_more
from nvflare_reliability.liveness import CHANNEL, LOOK, TOPIC

LOG = logging.getLogger(__name__)
TRIES = 6  # to start a job's process at a hospital, each after twice the pause; all take about a minute
MOST_DEATHS = 5  # of a job's process at one hospital within WITHIN seconds; after one more it is not started again
WITHIN = 3600.0


@dataclass
class _Job:
    """A job, as the server's own process knows it."""

    seen: set[str] = field(default_factory=set)  # cells of hospitals that were connected
    active: set[str] = field(default_factory=set)  # hospitals whose process the job has heard
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
        job.active = set(told)
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
        gone = {name for name in job.active & job.seen if not cell.is_cell_connected(name)}
        if not wait_no_more(fl_ctx, job_id, gone):
            del self.jobs[job_id]

    def _process_ended(self, request: Message) -> Message:
        """Take a hospital's word that a job's process has ended there; one that died is started again."""
        token, job_id = death_of_job(request)
        client, job = self.engine.client_manager.clients.get(token), self.jobs.get(job_id)
        if client and job and job_id in self.engine.run_processes and client.name in job.active:
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
