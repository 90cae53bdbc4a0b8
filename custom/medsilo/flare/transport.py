"""Asks sites over NVFlare: one task per site, all standing at once.

Never one broadcast: NVFlare copies a broadcast's data after the first site asked for it, and every other site would
get that site's model.
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
from medsilo.federation.channel import Missing, Outgoing, Receive
from medsilo.flare.wire import TASK, to_parcel, to_shareable
from medsilo.runs.messages import StudyMessage
from nvflare_reliability.forked import died
from nvflare_reliability.patches import deliver_once

POLL = 0.05  # seconds between looks at what no callback tells: aborts, timeouts, dead sites
Longest = Callable[[float], float]  # the seconds that are granted for an answer, of those that are asked for
Wrap = Callable[[StudyMessage], Shareable]  # a parcel as it travels
Away = Callable[[], Mapping[str, str]]  # the sites that nobody waits for, and why


@dataclass(eq=False)
class _Question:
    """One question to some sites: a task for each, and how it went. NVFlare's threads call it back."""

    transport: "FlareTransport"
    outgoing: Outgoing
    receive: Receive
    timeout: float
    gone: dict[str, str] = field(default_factory=dict)  # sites that nobody waits for any more, and why
    begun: float = field(default_factory=monotonic)
    tasks: dict[str, Task] = field(default_factory=dict)
    refused: dict[str, Missing] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    news: threading.Event = field(default_factory=threading.Event)

    def task_for(self, site: str) -> Task:
        """Make the task that asks this site."""
        task = self.tasks[site] = Task(
            name=TASK,
            data=Shareable(),
            timeout=0,  # is_over looks at the time
            before_task_sent_cb=self._before_sending,
            after_task_sent_cb=self._after_sending,
            result_received_cb=self._received,
        )
        deliver_once(task)
        return task

    def _before_sending(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        client_task.task.data = self.transport.wrap(self.outgoing(client_task.client.name))

    def _after_sending(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        client_task.task.data = Shareable()  # NVFlare holds its own reference until the site has it

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        site, result = client_task.client.name, client_task.result
        client_task.result = None
        if site in self.answered:  # with an answer that could not be read
            return
        try:  # an exception that left this callback would end the task without a reason
            self.receive(site, to_parcel(result))
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
        """Take an answer that can't be read as the site's answer; it is not asked for another."""
        if site not in self.tasks or site in self.answered:
            return
        try:
            to_parcel(unread)
        except MedsiloError as error:
            self.refused[site] = Missing.refused(error)
        self._has_answered(site, fl_ctx)
        self.transport.controller.cancel_task(self.tasks[site], TaskCompletionStatus.CANCELLED)

    def wait(self) -> None:
        """Wait for an answer, and for none longer than a moment."""
        self.news.wait(POLL)
        self.news.clear()

    def is_over(self) -> bool:
        """Return whether waiting is over: each site has answered or can't any more, or the time is up."""
        ended = {site for site, task in self.tasks.items() if task.completion_status is not None}
        self.gone |= {site: why for site, why in self.transport.away().items() if site in self.tasks}
        time_is_up = monotonic() > self.begun + self.transport.longest(self.timeout)
        return time_is_up or len(ended | self.answered | self.gone.keys()) == len(self.tasks)

    def cancel(self) -> None:
        """Take back the tasks that no site has answered."""
        for task in self.tasks.values():
            if task.completion_status is None:
                self.transport.controller.cancel_task(task, TaskCompletionStatus.CANCELLED)

    def missing(self) -> dict[str, Missing]:
        """Return the sites whose answer was not accepted, or never came."""
        lost = {site: Missing("lost", self._reason(site)) for site in self.tasks if site not in self.answered}
        return {**self.refused, **lost}

    def _reason(self, site: str) -> str:
        if self.tasks[site].completion_status == TaskCompletionStatus.CLIENT_DEAD:
            return "its process or connection died"
        return self.gone.get(site) or f"no answer within {self.timeout:g} s"


@dataclass(eq=False)
class FlareTransport:
    """Carries parcels between a controller and its sites."""

    controller: Controller
    fl_ctx: FLContext
    abort_signal: Signal
    away: Away = died
    longest: Longest = float
    wrap: Wrap = to_shareable
    question: _Question | None = None  # that stands
    ended_by: str = ""  # who said so before it was aborted

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        """Ask all these sites at once; returns those without an accepted answer, and why."""
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
        """Refuse a site's answer to the question that stands, since it can't be read."""
        if self.question:
            self.question.refuse(site, unread, fl_ctx)

    def pause(self, seconds: float) -> None:
        """Wait, unless the job is aborted."""
        self._raise_if_aborted()
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            self._raise_if_aborted()
            threading.Event().wait(POLL)

    def _absent(self, sites: Sequence[str]) -> dict[str, Missing]:
        """Sites that can't answer; asking a dead one would cost NVFlare's whole lead time in every round."""
        connected = {client.name for client in self.fl_ctx.get_engine().get_clients()}
        absent = {site: Missing("lost", "is not connected") for site in sites if site not in connected}
        for site in connected.intersection(sites):
            if self.controller.get_client_disconnect_time(site):
                absent[site] = Missing("lost", "its connection broke")
        return absent | {site: Missing("lost", why) for site, why in self.away().items() if site in sites}

    def _raise_if_aborted(self) -> None:
        if self.abort_signal.triggered:
            raise Aborted(f"the run was aborted{f' ({self.ended_by} cancelled it)' if self.ended_by else ''}")
