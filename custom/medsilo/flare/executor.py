"""Run a study's site as an executor in NVFlare's client."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.fl_context_utils import add_job_audit_event

from medsilo.core.errors import Aborted, ProcessDied, Refused, WeightsMissing
from medsilo.core.files import FILE, make_folder
from medsilo.core.package import ENGINE, facts_of
from medsilo.core.parent_watch import end_with, reuse_blocks
from medsilo.core.text import counted, is_safe_name, plain
from medsilo.exchange.bounds import Bounds, request_bounds
from medsilo.exchange.checks import check_packages
from medsilo.federation.limits import Clock
from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.permission import Permission
from medsilo.federation.protection import acquire_lock
from medsilo.federation.refusals import details, passes, public_reason
from medsilo.federation.site_context import Site, SiteContext
from medsilo.federation.site_stack import answering
from medsilo.flare.site_settings import settings_of_site
from medsilo.flare.study_events import StudyEvents
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.wire import let_tensors_travel, refusal, to_parcel, to_shareable
from medsilo.flare.workspace import code_of_job, kit_of, output_folder, plan_of_job, submitter_of
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.event_reading import RUNNING, fates
from medsilo.runs.messages import MOST_ROUNDS, Request, SiteWarning, StudyMessage
from medsilo.runs.own_files import LogEntry
from medsilo.site.settings import SiteSettings
from nvflare_reliability.chunking import RetryingRequests
from nvflare_reliability.forked import has_started
from nvflare_reliability.message_limits import Gate
from nvflare_reliability.patches import GARBAGE, audit_without_fail


def note(folder: Path, request: Mapping[str, Any] | None = None, **facts: Any) -> None:
    """Append a line to a site's log of answers; the function ignores errors of the disk."""
    if request is not None:
        number = request.get("round")
        known = isinstance(number, int) and 0 <= number <= MOST_ROUNDS
        facts |= {"task": plain(request.get("task", ""), 40), "round": number if known else 0}
    line = LogEntry(at=time.time(), **facts).model_dump(mode="json", exclude_defaults=True)
    with suppress(OSError):
        make_folder(folder)
        descriptor = os.open(folder / paths.DIARY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE)
        with os.fdopen(descriptor, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")


# if an error has not occurred for this number of seconds, the next occurrence of the error is logged again
QUIET = 600.0
# limit on the kinds of errors that a job may log, because a malicious server could provoke errors to fill the log
MOST_KINDS = 20


class SiteEvents(StudyEvents):
    """Writes events about the study at this site to the events.log of the site's startup kit."""

    def __init__(self, kit: Path | None, job: str = "", study: str = "") -> None:
        super().__init__(kit, job, study)
        self.runs = False  # whether the job's beginning was logged, but not yet its end
        self.wrong = dict[str, float]()  # for each kind of recent error, the time at which the error last occurred

    def begin(self, text: str) -> None:
        """Log that the site begins or resumes a job; if an earlier process died without logging the end of the job, log
        that failure first.
        """
        before = fates(self.kit).get(self.job) if self.kit else None
        if before in RUNNING:
            self.tell("failed", "this site's process for the job was ended; another goes on")
        self.tell("resumed" if before else "began", text)
        self.runs = True

    def end(self, text: str) -> None:
        """Log that the job ended at this site, unless the end is already logged."""
        if self.runs:
            self.runs = False
            self.tell("ended", text)

    def on_answer(self, wrong: str = "", died: bool = False, passing: bool = False) -> None:
        """Log a failed answer, unless an answer failed for the same kind of reason in the last QUIET seconds.

        Args:
            wrong: The reason of the failure, or "" after a successful answer.
            died: Whether the training process died.
            passing: Whether the failure is temporary, such as a full disk. All temporary failures are of one kind.
        """
        now = time.monotonic()
        if not wrong:
            self.wrong = {kind: then for kind, then in self.wrong.items() if now - then < QUIET}
            return
        # digits are ignored when two errors are compared
        kind = "died" if died else "passing" if passing else re.sub(r"\d+", "", wrong)
        if kind not in self.wrong:
            if len(self.wrong) == MOST_KINDS:
                return
            self.tell("failed" if died else "refused", wrong, needs_somebody=True)
        self.wrong[kind] = now


# If the plan sets no time limit, a site gives up an answer after its training processes have been idle for this number
# of seconds.
STOOD_STILL = 600.0
LOOK = 10.0  # seconds between two checks that the training processes are working
LEAST = 0.05  # training counts as active if its processes use at least this fraction of one core
ABORT_POLL = 0.2  # seconds between two checks whether the job was aborted


class MedsiloExecutor(Executor):
    """Answers the server's messages. If an error occurs, the site sends a rejection with a text that contains nothing
    private.
    """

    # the function that creates the participant; benchmarks replace this function
    participant: Callable[..., Participant] = staticmethod(participant_of)

    def __init__(self) -> None:
        super().__init__()
        # the site of the present study, and the clock of the study's time limit
        self.working: tuple[Site, Clock] | None = None
        self.folder: Path | None = None  # the site's folder in the study's run
        self.give_back: Callable[[], None] | None = None  # a function that frees the hospital's slot for this study
        # the object that limits the size of messages; None if the job's plan is invalid
        self.gate: Gate | None = None
        self.events = SiteEvents(None)
        self.measured = False  # whether the plan sets no time limit for an answer
        # the thread that computes an answer, while the calling thread checks if the job was aborted
        self.worker = ThreadPoolExecutor(1)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            let_tensors_travel()
            reuse_blocks()
            os.umask(0o077)  # only the user account of this process may read the logs
            audit_without_fail()
            # The parent process is NVFlare's client; if the hospital stops NVFlare's client, the job's process must
            # end, too.
            end_with(os.getppid())
            self._guard(fl_ctx)
            self.events = SiteEvents.of(fl_ctx, "client")
            GARBAGE.begin()
            has_started()
        elif event_type == EventType.END_RUN and self.give_back:
            early = "the job ended here before the study's last task; the server knows why"
            if self.folder and self.events.runs:
                note(self.folder, kind="ended", reason=early)
            self.events.end(early)
            self.give_back()

    def _guard(self, fl_ctx: FLContext) -> None:
        """Make the site reject messages from the server that are larger than the plan allows.

        This function ignores invalid plans, because the site's answer to the request "join" reports what is invalid.
        """
        cell = fl_ctx.get_engine().get_cell()
        gate = Gate(cell, Bounds())
        gate.guard_site()
        with suppress(Exception):
            plan = plan_of_job(fl_ctx, settings_of_site(fl_ctx))
            gate.allow(request_bounds(plan))
            self.gate = gate
            RetryingRequests(cell, timeouts_of(plan))
            self.measured = plan.participation.limit is None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        started, message = time.monotonic(), StudyMessage()
        checks: list[Callable[[], None]] = []  # a function that is called regularly while the site computes an answer

        def stop() -> None:
            if abort_signal.triggered:
                raise Aborted("the run was aborted")
            for check in checks:
                check()
            if not self.measured and time.monotonic() - started > message.facts.get("timeout", math.inf):
                raise Refused("took longer than participation.timeout, so the server no longer waits for this answer")

        def work() -> Shareable:
            site, clock = self.working = self.working or self._begin(message, fl_ctx, stop)
            with clock.running():
                checks.extend([clock.check, Busy().check] if self.measured else [clock.check])
                reply = site.answer(message, stop)
            self.events.on_answer()
            for warning in reply.facts.get("warnings", []):
                self.log_warning(fl_ctx, SiteWarning.received(warning).text)
            if message.facts.get("task") == "test":
                self.events.end("this site answered the test, the study's last task")
            if self.folder:
                measured = {key: reply.facts.get(key, 0.0) for key in ("seconds", "memory")}
                note(self.folder, message.facts, kind="answered", bytes=reply.size(), **measured)
            return to_shareable(reply)

        try:
            message = to_parcel(shareable)
            return _await(self.worker.submit(work), stop)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            reason = plain(public_reason(error))
            self.log_error(fl_ctx, reason)
            add_job_audit_event(fl_ctx, msg=f"medsilo refused: {reason}")
            self._write_private(error, fl_ctx)
            died = isinstance(error, ProcessDied)
            # the text that the site sends contains no path
            own = reason.replace("--kit KIT", f"--kit {self.events.kit or 'KIT'}")
            self.events.on_answer(own, died, passes(error))
            if self.folder:
                note(self.folder, message.facts, kind="died" if died else "refused", reason=own)
            return refusal(reason, passes(error), isinstance(error, WeightsMissing))

    def _begin(self, message: StudyMessage, fl_ctx: FLContext, stop: Callable[[], None]) -> tuple[Site, Clock]:
        """Begin a study, and return the site together with the clock of the study's time limit."""
        study, site = message.facts["study"], fl_ctx.get_identity_name()
        if not is_safe_name(study):
            raise Refused("the study's name has odd characters")
        self.events.study = study
        served = message.facts.get("packages")
        engine = served.get(ENGINE) if isinstance(served, dict) else None
        # A version of medsilo other than the server's might fail to read the plan.
        check_packages({ENGINE: facts_of(ENGINE)}, {ENGINE: engine})
        settings = self._settings(fl_ctx)
        submitted = plan_of_job(fl_ctx, settings)
        self.events.plan = submitted.hash
        plan = self._among(submitted, Request.received(message.facts).sites, site)
        check_packages(plan.code, served)
        self.folder = paths.site_folder(output_folder(fl_ctx, settings) / study, site)
        if plan.hash != message.facts["plan"]:
            raise Refused("the job's plan at this site differs from the server's; submit the job again")
        lead, kit = submitter_of(fl_ctx) or "", kit_of(fl_ctx)
        code = code_of_job(fl_ctx, submitted) if kit and settings.approval_of() != "none" else None
        place = SiteContext(plan, site, message.facts["sites"], settings, self.folder, lead, kit, submitted, code)
        permission = Permission(place)
        permission.begin()
        self.give_back = self.give_back or acquire_lock(plan, site, settings, self.folder)
        clock = Clock()
        self.events.begin(f"{plan.algorithm.title}, {counted(plan.rounds, 'round')}")
        note(self.folder, kind="began", plan=plan.hash, method=plan.algorithm.title, rounds=plan.rounds, lead=lead)
        return self._answering(place, permission, fl_ctx), clock

    def _settings(self, fl_ctx: FLContext) -> SiteSettings:
        return settings_of_site(fl_ctx)

    def _answering(self, context: SiteContext, permission: Permission, fl_ctx: FLContext) -> Site:
        room: Callable[[], Site] | None = None
        if context.settings.room.studies:
            from medsilo.airlock.study import room_of

            room = room_of(context)
        return answering(context, permission, self.participant, self._died_between, room)

    def _died_between(self, reason: str) -> None:
        """Log that the training process died while the site was not computing an answer."""
        self.events.tell("failed", reason)
        if self.folder:
            note(self.folder, kind="died", reason=reason)

    def _among(self, plan: Plan, sites: Sequence[str], site: str) -> Plan:
        """Return the plan; if the plan names no sites, add the server's list of sites."""
        if plan.participation.sites:
            return plan
        if site not in sites:
            raise Refused("the server's list of sites lacks this site")
        plan = plan.among(sites)
        if self.gate:
            self.gate.allow(request_bounds(plan))
        return plan

    def _write_private(self, error: Exception, fl_ctx: FLContext) -> None:
        """Write the details of an error to a private file.

        The details of an error may name patients, so these details must not be in NVFlare's logs, which a site may
        send.
        """
        try:
            folder = self.folder or output_folder(fl_ctx, settings_of_site(fl_ctx))
            make_folder(folder)
            with (folder / paths.ERRORS).open("a") as file:
                file.write(details(error) + "\n")
        except Exception as second:
            self.log_error(fl_ctx, f"the error's details could not be kept: {type(second).__name__}")


class Busy:
    """Checks by the used processor time that the training processes are working."""

    def __init__(self) -> None:
        self.looked = self.worked = time.monotonic()
        self.used = _used()

    def check(self) -> None:
        """Raise ProcessDied if the training processes have used too little processor time for too long."""
        now = time.monotonic()
        if now - self.looked > LOOK:
            used = _used()
            if used - self.used > LEAST * (now - self.looked):
                self.worked = now
            self.looked, self.used = now, used
        if now - self.worked > STOOD_STILL:
            raise ProcessDied(f"its training stalled for {now - self.worked:.0f} s")


def _used() -> float:
    """Return the processor time in seconds that all child processes have used.

    If there are no child processes, the function returns the processor time of this process.
    """
    own, used = psutil.Process(), 0.0
    for process in own.children(recursive=True) or [own]:
        with suppress(psutil.Error):  # a process that has ended raises psutil.Error
            used += sum(process.cpu_times()[:2])
    return used


def _await(work: Future, stop: Callable[[], None]) -> Shareable:
    """Wait for the result of a thread's work; while waiting, call `stop` regularly.

    An error that `stop` raises in the waiting thread also ends the working thread before its next batch.
    """
    while True:
        try:
            return work.result(timeout=ABORT_POLL)
        except NotYet:
            if work.done():  # the TimeoutError came from the work itself, which has ended
                raise
            stop()
