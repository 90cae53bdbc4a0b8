"""Watch the connections and the tokens of hospitals in the server's parent process, and report lost connections and new
tokens to running jobs.

A restarted hospital registers with a new token, which NVFlare does not report to running jobs. This component starts
the hospital's job processes again, which continue from the hospital's saved state. In a job's process, liveness.py asks
for the reports of this module.
"""

import logging
import threading
from collections.abc import Callable
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
from nvflare_reliability.kit_patches import DEATHS, failure_of_job, is_expelled, start_again, wait_no_more
from nvflare_reliability.liveness import CHANNEL, EXPELLED, LOOK, REFUSES, TOPIC, WAITS

LOG = logging.getLogger(__name__)
# maximum number of attempts to start a job's process at a hospital; all attempts together take about a minute
TRIES = 6
# The job process of a hospital is not restarted if it has died more than MOST_DEATHS times within WITHIN seconds.
MOST_DEATHS = 5
WITHIN = 3600.0
ASKS = 30.0  # seconds after which a job that has asked for no reports is assumed to use no reports
# arguments: the job, the hospital, and whether the job's process runs again at the hospital
Heard = Callable[[str, str, bool], None]


@dataclass
class _Job:
    seen: set[str] = field(default_factory=set)  # cells of the hospitals that have been connected to the server
    active: set[str] = field(default_factory=set)  # names of the hospitals that have sent a message to the job
    starts: dict[str, int] = field(default_factory=dict)  # number of times that each hospital has registered again
    # for each hospital, the times at which the job's process died
    deaths: dict[str, list[float]] = field(default_factory=dict)
    # for each hospital that can't return to the job, the reason
    problems: dict[str, str] = field(default_factory=dict)


class ReturningSites(FLComponent):
    """Lets restarted hospitals return to running jobs, and reports lost connections to these jobs.

    The component handles only jobs whose processes ask for reports about hospitals.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, _Job] = {}
        self.engine: Any = None
        self.listens = False
        # for each process that died and is being restarted, the job and the hospital
        self.dead = set[tuple[str, str]]()
        self.heard: Heard = lambda job, hospital, runs: None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self.engine = fl_ctx.get_engine()
            self.engine.get_cell().register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._asked)
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED and self.engine:
            self._listen()
            self._look(fl_ctx)

    def _asked(self, request: Message) -> Message:
        origin, told = str(request.get_header(MessageHeaderKey.ORIGIN)), request.payload
        job_id = origin.rpartition(".")[2]
        running = self.engine.run_processes.get(job_id)
        if not FqcnInfo(origin).is_on_server or running is None or not isinstance(told, list):
            return make_reply(CellCode.INVALID_REQUEST)
        self._listen()
        job = self.jobs.setdefault(job_id, _Job())
        job.active = set(told)
        hospitals = {
            client.name: {
                "cell": client.get_fqcn(),
                "closed": self._is_closed(job, client.get_fqcn(), job_id),
                "starts": job.starts.get(client.name, 0),
                "problem": EXPELLED if is_expelled(self.engine, client.name) else job.problems.get(client.name, ""),
            }
            for client in running[RunProcessKey.PARTICIPANTS].values()
        }
        return make_reply(CellCode.OK, body=hospitals)

    def _listen(self) -> None:
        """Start to receive the hospitals' reports about ended processes.

        This method must be called after NVFlare has registered its own function for these reports.
        """
        if not self.listens:
            self.listens = True
            where = {"channel": CellChannel.SERVER_MAIN, "topic": CellChannelTopic.REPORT_JOB_FAILURE}
            self.engine.get_cell().register_request_cb(**where, cb=self._process_ended)

    def _is_closed(self, job: _Job, cell: str, job_id: str) -> bool:
        """Return True if a hospital, or its job process, has lost its connection.

        The result is False for a hospital behind a relay, because such a hospital never has a direct connection.
        """
        cells = {cell, FQCN.join([cell, job_id])}
        connected = {name for name in cells if self.engine.get_cell().is_cell_connected(name)}
        job.seen |= connected
        return not cells & job.seen <= connected

    def _look(self, fl_ctx: FLContext) -> None:
        """Make restarted hospitals return to the jobs that they left, and make ended jobs finish."""
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
        """Make an ended job finish without waiting for the final reports of absent hospitals."""
        job, cell = self.jobs[job_id], self.engine.get_cell()
        # the cell of a hospital has the hospital's name, unless the hospital is behind a relay
        gone = {name for name in job.active & job.seen if not cell.is_cell_connected(name)}
        gone |= {name for name in job.active if is_expelled(self.engine, name)}
        if not wait_no_more(fl_ctx, job_id, gone):
            del self.jobs[job_id]

    def _process_ended(self, request: Message) -> Message:
        """Handle a hospital's report that a job's process has ended.

        A dead process is restarted, unless the hospital's policies reject the job or the hospital's certificate has
        expired. If the process is not restarted, the plan decides whether the job continues.
        """
        token, job_id, code, why = failure_of_job(request)
        client = self.engine.client_manager.clients.get(token)
        runs = client and code in DEATHS and job_id in self.engine.run_processes
        if runs and why.startswith((REFUSES, WAITS)):
            threading.Thread(target=self._has_reason, args=(request, job_id, client.name, why), daemon=True).start()
            return make_reply(CellCode.OK)
        job = self.jobs.get(job_id)
        if runs and job and client.name in job.active:
            deaths = [then for then in job.deaths.get(client.name, []) if monotonic() - then < WITHIN]
            job.deaths[client.name] = [*deaths, monotonic()]
            if len(deaths) < MOST_DEATHS:
                self.dead.add((job_id, client.name))
                self._take_in(job_id, client)
                self.heard(job_id, client.name, False)
            else:
                job.problems[client.name] = f"the job's process died there {MOST_DEATHS + 1} times within an hour"
            return make_reply(CellCode.OK)
        return self.engine.server.process_job_failure(request)

    def _has_reason(self, request: Message, job_id: str, hospital: str, why: str) -> None:
        """Report to a job why a hospital can't take part. If the job does not ask for reports about hospitals, NVFlare
        ends the job.
        """
        deadline = monotonic() + ASKS
        while job_id not in self.jobs and monotonic() < deadline:
            threading.Event().wait(LOOK)
        if job_id in self.jobs:
            self.jobs[job_id].problems[hospital] = why
            LOG.error("%s, job %s: %s", hospital, job_id, why)
        else:
            self.engine.server.process_job_failure(request)

    def _take_in(self, job_id: str, client: Client) -> None:
        self.jobs[job_id].problems.pop(client.name, None)
        threading.Thread(target=self._start, args=(job_id, client), daemon=True).start()

    def _start(self, job_id: str, client: Client) -> None:
        """Start a job's process at a hospital, and try again several times if the start fails."""
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
                if (job_id, client.name) in self.dead:
                    self.dead.discard((job_id, client.name))
                    self.heard(job_id, client.name, True)
                return
        job.problems[client.name] = f"it is back and can't take part: {one_line(why, 300)}"
        LOG.error("%s, job %s: %s", client.name, job_id, job.problems[client.name])


def hear_of_processes(engine: Any, heard: Heard) -> None:
    """Set a function that is called when a job's process dies at a hospital, and again when the process was restarted.

    The server's startup kit must list the component `returning_sites`.
    """
    if isinstance(returning := engine.get_component("returning_sites"), ReturningSites):
        returning.heard = heard
