"""Run the server of a study as a controller of NVFlare's server."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from medsilo.core import model_folders
from medsilo.core.errors import Aborted, MedsiloError
from medsilo.core.parent_watch import end_with, reuse_blocks
from medsilo.core.text import counted, is_safe_name, plain
from medsilo.exchange.bounds import Bounds, answer_bounds
from medsilo.flare import workspace
from medsilo.flare.study_events import StudyEvents
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.wire import TASK, TRAIN, let_tensors_travel, refuse, to_shareable
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.messages import StudyMessage
from medsilo.runs.paths import AFTER, CANCELS, PROGRESS
from medsilo.runs.rounds import Progress, Round
from medsilo_server.coordinator import Coordinator
from medsilo_server.flare.artifacts import metrics_after, metrics_of_round, write_artifacts
from medsilo_server.flare.slow_sites import SlowSites
from medsilo_server.flare.tracking import show_in_trackers
from medsilo_server.flare.transport import Away, FlareTransport, Longest
from medsilo_server.record import Record, new_rounds, new_study
from nvflare_reliability.answer_gate import AnswerGate, is_unread
from nvflare_reliability.chunking import RetryingRequests
from nvflare_reliability.forked import died
from nvflare_reliability.kit_patches import tell_sites_apart
from nvflare_reliability.liveness import Liveness
from nvflare_reliability.patches import GARBAGE, audit_without_fail, cell_of_job
from nvflare_reliability.timeouts import LONGEST

# Seconds for which a job that only returns the results of a finished study waits for the sites' processes. If the job
# ended at once, NVFlare would wait 15 minutes for a site whose process starts after the end of the job.
JOINING = 120.0
LOOK = 2.0
# Maximum bytes of the rounds in one progress reply, which is about eighty rounds of three sites. A single round that
# exceeds the maximum is sent nevertheless.
TOLD = 64_000


def _wire_of(plan: Plan) -> tuple[Callable[[StudyMessage], Shareable], str, bool]:
    """Return three values: the function that converts messages for NVFlare, the name of NVFlare's task for a round, and
    whether training scripts receive the messages.
    """
    if not plan.task.scripted:
        return to_shareable, TASK, False
    from medsilo.flare.script_wire import as_model

    return as_model, TRAIN, True


class MedsiloController(Controller):
    gate: AnswerGate  # reads and checks answers; this object is created when the controller starts

    def __init__(self, study: str = "", resume: bool = False, engine: str = "nvflare") -> None:
        """Prepare a controller.

        If the job is a clone of a job whose study is unfinished, the controller continues this study, as `medsilo
        resume` requires.

        Args:
            study: The name of the run folder. By default, the name consists of the method, the task and the time.
        """
        super().__init__(task_check_period=0.05)
        self.study, self.resume, self.engine = study, resume, engine
        self.running: Coordinator | None = None
        self.transport: FlareTransport | None = None
        self.presence: Liveness | None = None
        self.requests: RetryingRequests | None = None
        self.events = StudyEvents(None)
        self.ended = threading.Event()
        self.shown = False  # whether the rounds so far were shown in the job's trackers

    def start_controller(self, fl_ctx: FLContext) -> None:
        if workspace.kit_of(fl_ctx, "server") is None:
            self.engine = "simulator"
            tell_sites_apart()
        let_tensors_travel(to_files=True)
        reuse_blocks()
        os.umask(0o077)  # only the server's user account may read the job's files, such as logs
        audit_without_fail()
        end_with(os.getppid())
        self.gate = AnswerGate(cell_of_job(fl_ctx), Bounds(), TASK, refuse)
        self.gate.guard_server()
        fl_ctx.get_engine().register_app_command(PROGRESS, self._tell_lead)

    def _tell_lead(self, topic: str, request: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """Return the study's progress, including the rounds that the lead has not received yet.

        In NVFlare, only the job's submitter and admins may request the progress.
        """
        request = request if isinstance(request, dict) else {}
        running, after = self.running, request.get(AFTER)
        if self.transport and (who := request.get(CANCELS)):
            self.transport.ended_by = plain(who, 80)
        if running is None:
            return {}
        told = Progress(
            study=running.study,
            planned=running.plan.rounds,
            metric=running.plan.task.goal.metric,
            absent=running.absent,
            away=self.presence.absences() if self.presence else {},
            rounds=new_rounds(running.rounds, after or 0, TOLD),
            turns=running.scheduler.turns.now(),
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
            self._publish(earlier, fl_ctx)
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
            away = presence.hopeless  # a round waits for absent sites only if the sites may return
            if plan.participation.when_missing == "continue":
                least = plan.participation.required
                away = partial(presence.left_behind, len(plan.participation.sites or sites), least)
            # the time limit LONGEST is used only if the server's parent process reports which sites are connected
            if plan.participation.limit is None:
                longest = lambda timeout: LONGEST if presence.sites else timeout  # noqa: E731
        transport = self.transport = FlareTransport(self, fl_ctx, abort_signal, away, longest, *_wire_of(plan))
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
                if kit:
                    threading.Thread(target=self._watch, args=(self.running,), name="slow sites", daemon=True).start()
                summary = self.running.run(resume)
                self._show([], fl_ctx, metrics_after(summary))
                return str(output / f"{summary.study}")
        finally:
            # if another job still leads the study, the summary is unchanged, and this job publishes no results
            if record.summary() != before:
                self._publish(record, fl_ctx)

    def _publish(self, record: Record, fl_ctx: FLContext) -> None:
        """Copy the public files of a study's run into the folder of the NVFlare job, and write metrics there in
        NVFlare's format.
        """
        if self.engine == "nvflare":
            workspace.publish(record.folder, fl_ctx)
        write_artifacts(record.folder, Path(workspace.workspace_of(fl_ctx).get_run_dir(fl_ctx.get_job_id())))

    def _watch(self, study: Coordinator) -> None:
        sites = SlowSites(self.events)
        while not self.ended.wait(LOOK):
            sites.look(study.scheduler.turns.now(), [*study.rounds])
            self.events.on_asking(dict(study.scheduler.channel.again))

    @staticmethod
    def _among(plan: Plan, begun: Record | None, sites: Sequence[str]) -> Plan:
        """Return the plan. If the plan names no hospitals, add the hospitals' names to the plan.

        Args:
            begun: The record of a resumed study, whose hospitals are added. Without a record, the connected hospitals
                are added.
        """
        if begun:
            sites = load_plan(begun.folder / paths.PLAN).participation.sites
        # if too few sites are connected, the plan stays without hospitals, and the study does not begin
        return plan.among(sites) if len(sites) >= plan.participation.required else plan

    def _look_for_sites(self, plan: Plan, fl_ctx: FLContext) -> Liveness:
        sync, silence = fl_ctx.get_engine().sync_clients_from_main_process, timeouts_of(plan).silence
        patience = silence if plan.participation.limit is None else math.inf
        gate = self.gate
        self.presence = Liveness(gate.cell, gate.last_heard, sync, silence, patience, gate.expelled)
        self.presence.begin()
        return self.presence

    def _tell(self, fl_ctx: FLContext, line: Round) -> None:
        missing = plain({**line.refused, **line.lost} or "none")
        self.events.on_round(line.round, {site: line.absence(site) for site in line.asked})
        self.log_info(fl_ctx, f"round {line.round}: {counted(len(line.answered), 'site')} answered, missing: {missing}")
        self._show([line], fl_ctx)

    def _show(self, rounds: Sequence[Round], fl_ctx: FLContext, after: dict[str, Any] | None = None) -> None:
        """Show the results of rounds in the job's trackers. A job that continues a study shows all earlier rounds
        first.

        In a study with a training script, trackers show the numbers that the script logs, and no others.

        Args:
            rounds: The new rounds.
            fl_ctx: NVFlare's context.
            after: The line of round_metrics.jsonl about the model after the last round.
        """
        study = self.running
        if study is None or study.plan.task.scripted:
            return
        new, self.shown = rounds if self.shown else study.rounds, True
        lines = [metrics_of_round(study.plan.task.goal.metric, line) for line in new]
        for line in [*lines, after] if after else lines:
            show_in_trackers(line, fl_ctx.get_engine())

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Stop the threads that watch hospitals, and the threads that read answers.

        The study's state needs no saving, because it was saved after the last round.
        """
        self.ended.set()
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
