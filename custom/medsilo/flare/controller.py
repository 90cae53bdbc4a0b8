"""The one controller of all methods: gives the coordinator its place on NVFlare's server."""

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from medsilo.core import model_folders, optional
from medsilo.core.errors import Aborted, MedsiloError
from medsilo.core.parent_watch import end_with, reuse_blocks
from medsilo.core.text import counted, is_safe_name, plain
from medsilo.federation.bounds import Bounds, answer_bounds
from medsilo.federation.coordinator import Coordinator
from medsilo.flare import workspace
from medsilo.flare.study_events import StudyEvents
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.transport import Away, FlareTransport, Longest
from medsilo.flare.wire import TASK, let_tensors_travel, refuse, to_shareable
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.paths import AFTER, CANCELS, PROGRESS
from medsilo.runs.record import Record, new_rounds, new_study
from medsilo.runs.rounds import Progress, Round
from nvflare_reliability.answer_gate import AnswerGate, is_unread
from nvflare_reliability.chunking import RetryingRequests
from nvflare_reliability.forked import died
from nvflare_reliability.liveness import Liveness
from nvflare_reliability.patches import GARBAGE, cell_of_job
from nvflare_reliability.timeouts import LONGEST

JOINING = 120.0  # seconds: NVFlare waits 15 minutes for a site whose process comes when the job has ended
TOLD = 64_000  # bytes of rounds in an answer: some eighty rounds of three sites; one round if it alone has more


class MedsiloController(Controller):
    """Runs the plan that lies in the job."""

    gate: AnswerGate  # from the start on

    def __init__(self, study: str = "", resume: bool = False, engine: str = "nvflare") -> None:
        """`study` names the run's folder (by default method, task and time); `resume` goes on from its checkpoint.

        A clone of a job whose study did not end goes on with that study by itself: so `medsilo resume` works.
        """
        super().__init__(task_check_period=0.05)
        self.study, self.resume, self.engine = study, resume, engine
        self.running: Coordinator | None = None
        self.transport: FlareTransport | None = None
        self.presence: Liveness | None = None
        self.requests: RetryingRequests | None = None
        self.events = StudyEvents(None)

    def start_controller(self, fl_ctx: FLContext) -> None:
        if workspace.kit_of(fl_ctx, "server") is None:
            self.engine = "simulator"
        let_tensors_travel(to_files=True)
        reuse_blocks()
        os.umask(0o077)  # logs, too, are for this account alone
        end_with(os.getppid())
        self.gate = AnswerGate(cell_of_job(fl_ctx), Bounds(), TASK, refuse)
        self.gate.guard_server()
        fl_ctx.get_engine().register_app_command(PROGRESS, self._tell_lead)

    def _tell_lead(self, topic: str, asked: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """Return the rounds after the one that is asked from; NVFlare lets the job's submitter and admins ask."""
        asked = asked if isinstance(asked, dict) else {}
        running, after = self.running, asked.get(AFTER)
        if self.transport and (who := asked.get(CANCELS)):
            self.transport.ended_by = plain(who, 80)
        if running is None:
            return {}
        told = Progress(
            study=running.study,
            planned=running.plan.rounds,
            metric=running.plan.task.goal.metric,
            absent=running.absent,
            away=self.presence.absences() if self.presence else {},
            steps={site: step for site, own in running.asker.joined.items() if (step := own.steps.get("validation"))},
            rounds=new_rounds(running.rounds, after or 0, TOLD),
            turns=running.asker.turns.now(),
        )
        return told.as_json()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self.events = StudyEvents.of(fl_ctx, "server")
        try:
            self.log_info(fl_ctx, f"medsilo finished: {self._lead(abort_signal, fl_ctx)}")
            self.events.tell("ended", "the study finished")
        except Aborted as error:
            self.log_warning(fl_ctx, str(error))
            self.events.tell("ended", str(error))
        except MedsiloError as error:
            self.events.tell("failed", str(error), needs_somebody=True)
            self.log_error(fl_ctx, plain(f"{error} {error.private}"))
            if self.engine == "nvflare":
                workspace.publish_refusal(str(error), fl_ctx)
            self.system_panic(str(error), fl_ctx)

    def _lead(self, abort_signal: Signal, fl_ctx: FLContext) -> str:
        """Lead a study to its end; returns its folder."""
        settings = workspace.settings_of_server(fl_ctx)
        plan = workspace.plan_of_job(fl_ctx, settings)
        self.events.plan = plan.hash
        if plan.algorithm.pooled:
            raise MedsiloError(
                f"{plan.algorithm.name} pools all data and never runs on NVFlare; give --engine inprocess"
            )
        if plan.task.scripted:
            let_tensors_travel(to_files=True, plainly=True)
        study, resume = self.study or new_study(plan), self.resume
        if not is_safe_name(study):
            raise MedsiloError(f"study name {study!r} has odd characters; use letters, digits, '.', '_' and '-'")
        output = workspace.output_folder(fl_ctx, settings)
        model_folders.look_in(output / model_folders.FOLDER, workspace.file_of_job(fl_ctx, paths.PLAN).parent)
        record = Record(output / study)
        original = workspace.cloned_from(fl_ctx)
        earlier = Record.of_job(output, original) if original else None
        if earlier and (ended := earlier.finished()):
            earlier.check_owner(workspace.submitter_of(fl_ctx))
            self.log_info(fl_ctx, f"{ended.study} was finished when its job ended; this job hands out its results")
            workspace.publish(earlier.folder, fl_ctx)
            self._look_for_sites(plan, fl_ctx).wait_for_all(JOINING, abort_signal)
            return str(earlier.folder)
        if earlier and earlier.can_go_on():
            record, resume = earlier, True
            self.log_info(fl_ctx, f"goes on with {record.folder.name}")
        elif earlier:
            self.log_warning(fl_ctx, f"{earlier.folder.name} has no checkpoint: starts again as {record.folder.name}")
        record.claim(workspace.submitter_of(fl_ctx), resume)
        before = record.summary()
        sites = [client.name for client in fl_ctx.get_engine().get_clients()]
        plan = self._among(plan, record if resume else None, sites)
        away: Away = died
        longest: Longest = float
        if self.engine == "nvflare":
            presence = self._look_for_sites(plan, fl_ctx)
            away = presence.hopeless  # who may come back is waited for
            if plan.participation.when_missing == "continue":
                least = plan.participation.required
                away = partial(presence.left_behind, len(plan.participation.sites or sites), least)
            if plan.participation.limit is None:  # and the server's own process tells who is there
                longest = lambda timeout: LONGEST if presence.sites else timeout  # noqa: E731
        transport = self.transport = FlareTransport(
            self, fl_ctx, abort_signal, away, longest, optional.as_model if plan.task.scripted else to_shareable
        )
        self.gate.allow(answer_bounds(plan))
        self.requests = RetryingRequests(self.gate.cell, timeouts_of(plan))
        try:
            with record.led_by(fl_ctx.get_job_id()):
                self.events.study = record.folder.name
                self.events.tell(
                    "resumed" if resume else "began", f"{plan.algorithm.title}, {counted(plan.rounds, 'round')}"
                )
                tell, kit = partial(self._tell, fl_ctx), workspace.kit_of(fl_ctx, "server")
                self.running = Coordinator(plan, sites, transport, record, self.engine, tell, settings, kit)
                GARBAGE.begin()
                return str(output / f"{self.running.run(resume).study}")
        finally:
            # What lies in the folder is another job's until this one has written its summary.
            if self.engine == "nvflare" and record.summary() != before:
                workspace.publish(record.folder, fl_ctx)

    @staticmethod
    def _among(plan: Plan, begun: Record | None, sites: Sequence[str]) -> Plan:
        """Return the plan for those who are there, where it names no hospitals, or who were when its study began."""
        if begun:
            sites = load_plan(begun.folder / paths.PLAN).participation.sites
        return plan.among(sites) if len(sites) >= plan.participation.required else plan  # else it does not begin

    def _look_for_sites(self, plan: Plan, fl_ctx: FLContext) -> Liveness:
        """Learn from now on who is there."""
        sync, silence = fl_ctx.get_engine().sync_clients_from_main_process, timeouts_of(plan).silence
        patience = silence if plan.participation.limit is None else math.inf
        self.presence = Liveness(self.gate.cell, self.gate.last_heard, sync, silence, patience)
        self.presence.begin()
        return self.presence

    def _tell(self, fl_ctx: FLContext, line: Round) -> None:
        missing = plain({**line.refused, **line.lost} or "none")
        self.events.on_round(line.round, {site: line.absence(site) for site in line.asked})
        self.log_info(fl_ctx, f"round {line.round}: {counted(len(line.answered), 'site')} answered, missing: {missing}")

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """End what looks for hospitals and reads answers; what the coordinator keeps is on disk after every round."""
        self.gate.end_readers()
        if self.requests:
            self.requests.end_fetchers()
        if self.presence:
            self.presence.ended.set()

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        if is_unread(result) and self.transport:
            self.transport.refuse(client.name, result, fl_ctx)
        else:
            self.log_warning(fl_ctx, f"a late answer of {client.name} was dropped: its round is over")
