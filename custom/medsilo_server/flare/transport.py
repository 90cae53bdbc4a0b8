"""Send requests to sites over NVFlare. Each site has a separate NVFlare task.

NVFlare's broadcast is unsuitable. NVFlare copies the data of a broadcast when the first site fetches the data, so all
other sites would get the first site's model.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from nvflare.apis.controller_spec import ClientTask, SendOrder, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.fl_context_utils import add_job_audit_event

from medsilo.core.errors import Aborted, MedsiloError
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.flare.wire import TASK, to_parcel, to_shareable
from medsilo.runs.messages import StudyMessage
from nvflare_reliability.forked import died
from nvflare_reliability.liveness import EXPELLED, REFUSES
from nvflare_reliability.patches import deliver_once

# Seconds between two checks for events for which NVFlare has no callbacks, such as aborts and timeouts.
POLL = 0.05
Longest = Callable[[float], float]
Wrap = Callable[[StudyMessage], Shareable]
Away = Callable[[], Mapping[str, str]]  # returns the sites for which a round does not wait, each with the reason


@dataclass(eq=False)
class _Question:
    """A request to several sites; NVFlare has a separate task for each site. Threads of NVFlare call some of the
    methods.
    """

    transport: "FlareTransport"
    outgoing: Outgoing
    receive: Receive
    timeout: float
    # the sites from which no answer is expected any more, each with the reason
    gone: dict[str, str] = field(default_factory=dict)
    begun: float = field(default_factory=monotonic)
    tasks: dict[str, Task] = field(default_factory=dict)
    refused: dict[str, Missing] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    news: threading.Event = field(default_factory=threading.Event)

    def task_for(self, site: str) -> Task:
        task = self.tasks[site] = Task(
            name=TASK,
            data=Shareable(),
            timeout=0,  # NVFlare sets no time limit for the answer, because `is_over` limits the time
            before_task_sent_cb=self._before_sending,
            after_task_sent_cb=self._after_sending,
            result_received_cb=self._received,
        )
        deliver_once(task)
        return task

    def _before_sending(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        message = self.outgoing(client_task.client.name)
        if message.facts.get("task") == "round":
            client_task.task.name = self.transport.rounds  # NVFlare chooses filters by the name of a task
        client_task.task.data = self.transport.wrap(message)

    def _after_sending(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        # frees this reference to the message; NVFlare itself keeps the message until the site has fetched it
        client_task.task.data = Shareable()

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        site, result = client_task.client.name, client_task.result
        client_task.result = None
        # AnswerGate, which checks each answer first, adds a site to `answered` if its answer is unreadable
        if site in self.answered:
            return
        try:  # errors are caught, because NVFlare would end the task without a reason
            self.receive(site, to_parcel(result, self.transport.of_script))
        except MedsiloError as error:
            self.refused[site] = Missing.refused(error)
        except Exception as error:
            self.transport.controller.log_exception(fl_ctx, f"while merging the answer of {site}")
            self.refused[site] = Missing("refused", f"{type(error).__name__} at the server; its log says more")
        self._has_answered(site, fl_ctx)

    def _has_answered(self, site: str, fl_ctx: FLContext) -> None:
        if site in self.refused:
            add_job_audit_event(fl_ctx, msg=f"medsilo refused the answer of {site}: {self.refused[site].reason}")
        self.answered.add(site)
        self.news.set()

    def refuse(self, site: str, unread: Shareable, fl_ctx: FLContext) -> None:
        if site not in self.tasks or site in self.answered:
            return
        try:
            to_parcel(unread)
        except MedsiloError as error:
            self.refused[site] = Missing.refused(error)
        self._has_answered(site, fl_ctx)
        self.transport.controller.cancel_task(self.tasks[site], TaskCompletionStatus.CANCELLED)

    def wait(self) -> None:
        self.news.wait(POLL)
        self.news.clear()

    def is_over(self) -> bool:
        """Return True if the time for answers is over, or if no site is left that could still answer."""
        ended = {site for site, task in self.tasks.items() if task.completion_status is not None}
        self.gone |= {site: why for site, why in self.transport.away().items() if site in self.tasks}
        time_is_up = monotonic() > self.begun + self.transport.longest(self.timeout)
        return time_is_up or len(ended | self.answered | self.gone.keys()) == len(self.tasks)

    def cancel(self) -> None:
        for task in self.tasks.values():
            if task.completion_status is None:
                self.transport.controller.cancel_task(task, TaskCompletionStatus.CANCELLED)

    def missing(self) -> dict[str, Missing]:
        lost = {site: _missing(self._reason(site)) for site in self.tasks if site not in self.answered}
        return {**self.refused, **lost}

    def _reason(self, site: str) -> str:
        if _is_final(why := self.gone.get(site, "")):
            return why
        if self.tasks[site].completion_status == TaskCompletionStatus.CLIENT_DEAD:
            return "its process or connection died"
        return self.gone.get(site) or f"no answer within {self.timeout:g} s"


@dataclass(eq=False)
class FlareTransport:
    """Carries messages between the server and the sites as NVFlare tasks of a controller."""

    controller: Controller
    fl_ctx: FLContext
    abort_signal: Signal
    away: Away = died
    longest: Longest = float
    wrap: Wrap = to_shareable
    rounds: str = TASK
    of_script: bool = False
    question: _Question | None = None
    ended_by: str = ""

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        """Send a request to several sites at once, and return the sites without an accepted answer, each with the
        reason.

        Args:
            outgoing: Returns the message for a site.
            receive: Called with the name and the answer of a site. To reject the answer, `receive` raises MedsiloError.
        """
        missing = self._absent(sites)
        question = self.question = _Question(self, outgoing, receive, timeout)
        for site in sites:
            if site not in missing:
                task = question.task_for(site)
                self.controller.send(task, self.fl_ctx, targets=[site], send_order=SendOrder.SEQUENTIAL)
        try:
            while not question.is_over():
                question.wait()
                self._raise_if_aborted()
        finally:
            self.question = None
            question.cancel()
        return {**missing, **question.missing()}

    def refuse(self, site: str, unread: Shareable, fl_ctx: FLContext) -> None:
        if self.question:
            self.question.refuse(site, unread, fl_ctx)

    def pause(self, seconds: float) -> None:
        self._raise_if_aborted()
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            self._raise_if_aborted()
            threading.Event().wait(POLL)

    def _absent(self, sites: Sequence[str]) -> dict[str, Missing]:
        """Return the sites that can't answer; they get no request, because NVFlare would wait a long time for their
        answers in each round.
        """
        connected = {client.name for client in self.fl_ctx.get_engine().get_clients()}
        absent = {site: Missing("lost", "is not connected") for site in sites if site not in connected}
        for site in connected.intersection(sites):
            if self.controller.get_client_disconnect_time(site):
                absent[site] = Missing("lost", "its connection broke")
        return absent | {site: _missing(why) for site, why in self.away().items() if site in sites}

    def _raise_if_aborted(self) -> None:
        if self.abort_signal.triggered:
            raise Aborted(f"the run was aborted{f' ({self.ended_by} cancelled it)' if self.ended_by else ''}")


def _missing(why: str) -> Missing:
    return Missing("refused" if _is_final(why) else "lost", why)


def _is_final(why: str) -> bool:
    """Return True if a missing site can't return to the job, because the server expelled the site, or because the
    site's policies reject the job.
    """
    return why.startswith((EXPELLED, REFUSES))
