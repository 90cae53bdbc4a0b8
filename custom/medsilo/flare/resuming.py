"""A component of the server's own process: it goes on with studies whose job died, as often as their plan says.

It submits a copy of the job, as `medsilo resume` does, when all its hospitals are back.
"""

import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job, JobMetaKey, RunStatus
from nvflare.apis.job_def_manager_spec import JobDefManagerSpec

from medsilo.core.errors import MedsiloError
from medsilo.core.yaml_text import load_yaml
from medsilo.flare.workspace import kit_folder, output_folder, settings_of_server
from medsilo.runs import event_reading, paths
from medsilo.runs.events import Event, What, write
from medsilo.runs.paths import GOES_ON
from medsilo.runs.record import Record
from medsilo.schedule.participation import Participation

DIED = (
    RunStatus.FINISHED_ABNORMAL,
    RunStatus.FINISHED_EXECUTION_EXCEPTION,
    RunStatus.FAILED_TO_RUN,
    RunStatus.ABANDONED,
)
OF_ONE_JOB = (  # in a job's meta: what its copy does not have
    JobMetaKey.JOB_ID,
    JobMetaKey.JOB_DEPLOY_DETAIL,
    JobMetaKey.SCHEDULE_COUNT,
    JobMetaKey.LAST_SCHEDULE_TIME,
    JobMetaKey.SCHEDULE_HISTORY,
    JobMetaKey.JOB_CLIENTS,
)
TIMES = "resumed"  # in a job's meta: how often its study went on by itself
LOOK = 2.0  # seconds between two looks at what waits
PAUSE, LONGEST = 10.0, 600.0  # seconds before the first time, and at most before a later one: each is twice as long
GATHER = 180.0  # seconds more that it waits for hospitals that are away; then it goes on as the plan lets it
ROOM, LEAST_ROOM = 2, 1 << 20  # times the checkpoints' bytes, and bytes, that are to be free


@dataclass(frozen=True)
class Ended:
    """A job that died, and its study."""

    job: Job
    record: Record
    rules: Participation

    @property
    def times(self) -> int:
        """Return how often the study went on by itself."""
        return max(int(self.job.meta.get(TIMES, 0)), 0)  # a lead wrote the first job's meta

    @property
    def turn(self) -> str:
        """Return which of how many times is the next."""
        return f"{self.times + 1} of {self.rules.resume}"

    @property
    def hopeless(self) -> str:
        """Return why the study does not go on by itself; nothing where it does."""
        if not self.rules.resume:
            return "participation.resume is 0"
        if self.times >= self.rules.resume:
            return f"it went on by itself {self.times} times already (participation.resume)"
        if not (self.record.finished() or self.record.can_go_on()):
            return "there is no checkpoint to go on from"
        return "" if self._passes else "somebody has to mend what ended it"

    @property
    def _passes(self) -> bool:
        """Return whether the study did not say how it ended, or that it passes. A job that leads it adds itself to
        JOBS, so an older summary is another job's."""
        told, begun = self.record.folder / paths.SUMMARY, self.record.folder / paths.JOBS
        summary = self.record.summary()
        if summary is None or told.stat().st_mtime < begun.stat().st_mtime:
            return True
        return summary.finished or summary.passing

    def has_room(self) -> bool:
        """Return whether the disk takes its next checkpoints."""
        taken = sum(path.stat().st_size for path in self.record.checkpoints.glob("*"))
        return shutil.disk_usage(self.record.folder).free > ROOM * taken + LEAST_ROOM

    def copy(self) -> dict[str, Any]:
        """Return the meta of the job that goes on."""
        left = {GOES_ON, *(key.value for key in OF_ONE_JOB)}
        own = {key: value for key, value in self.job.meta.items() if key not in left}
        led = (self.record.folder / paths.JOBS).read_text("utf-8").split()
        of = self.job.job_id if self.job.job_id in led else own[JobMetaKey.CLONED_FROM.value]
        return own | {JobMetaKey.CLONED_FROM.value: of, TIMES: self.times + 1}


@dataclass(frozen=True)
class Due:
    """A study that is to go on, at a time of the machine's clock."""

    ended: Ended
    at: float


class ResumedStudies(FLComponent):
    """Writes which jobs ended otherwise than well, and goes on with their studies."""

    def __init__(self) -> None:
        super().__init__()
        self.resuming: Resuming | None = None  # from the server's start on

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            studies = output_folder(fl_ctx, settings_of_server(fl_ctx))
            self.resuming = Resuming(fl_ctx.get_engine(), kit_folder(fl_ctx), studies)
            self.resuming.begin()
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED) and self.resuming:
            self.resuming.ended(fl_ctx)


class Resuming:
    """What waits at a server to go on."""

    def __init__(self, engine: Any, kit: Path, studies: Path) -> None:
        self.engine, self.kit, self.studies = engine, kit, studies
        self.due: dict[str, Due] = {}

    def begin(self) -> None:
        """Take what died with the server, and go on from now on."""
        fates = event_reading.fates(self.kit)
        with self.engine.new_context() as fl_ctx:
            for job in self._jobs().get_jobs_by_status(list(DIED), fl_ctx):
                self.take(job, "the server, or its process for the job, was ended", fates.get(job.job_id))
        threading.Thread(target=self._watch, daemon=True).start()

    def ended(self, fl_ctx: FLContext) -> None:
        """Take a job that has ended otherwise than well."""
        job_id = str((fl_ctx.get_prop(FLContextKey.EVENT_DATA) or {}).get("job_id", ""))
        job = self._jobs().get_job(job_id, fl_ctx) if job_id else None
        status = str(job.meta.get(JobMetaKey.STATUS.value, "")) if job else ""
        if job and status.startswith("FINISHED:") and status != RunStatus.FINISHED_COMPLETED:
            told = f"the job's process ended as {status.removeprefix('FINISHED:')}"
            self.take(job, told, event_reading.fates(self.kit).get(job_id, "began"))

    def take(self, job: Job, why: str, fate: str | None) -> None:
        """Go on with a job's study when that is possible, and write down whether that is so.

        why: the job died; fate: the last that was written of it, which is the last word where it has ended.
        """
        with suppress(MedsiloError, OSError, ValueError, LookupError, TypeError):  # a damaged record is for a person
            ended = self._study_of(job)
            if ended and not self._is_last(ended):
                return
            if ended and not ended.hopeless:
                self.due[job.job_id] = Due(ended, time.monotonic() + min(PAUSE * 2**ended.times, LONGEST))
                told = f"{why}; it goes on by itself, {ended.turn} times"
                what: What = "waits" if fate in event_reading.LAST else "failed"
                write(self.kit, Event(what, told, study=ended.record.folder.name, job=job.job_id))
                # for who watches the job; the disk may be full
                with suppress(Exception), self.engine.new_context() as fl_ctx:
                    self._jobs().update_meta(job.job_id, {GOES_ON: ended.turn}, fl_ctx)
                return
            if ended and ended.rules.resume:
                why = f"{why}; {ended.hopeless}"
        if fate in event_reading.RUNNING:
            write(self.kit, Event("failed", why, job=job.job_id, needs_somebody=True))

    def _study_of(self, job: Job) -> Ended | None:
        """Return the study of a job that died: one that it led, or that it was to go on with."""
        if job.meta.get(JobMetaKey.STATUS.value) not in DIED:
            return None
        of = (job.job_id, str(job.meta.get(JobMetaKey.CLONED_FROM.value, "")))
        record = next((found for own in of if own and (found := Record.of_job(self.studies, own))), None)
        if record is None:
            return None
        plan = load_yaml((record.folder / paths.PLAN).read_text("utf-8"))
        return Ended(job, record, Participation.model_validate(plan["participation"]))

    def _is_last(self, ended: Ended) -> bool:
        """Return whether no newer job leads a study, or is to."""
        own, at = JobMetaKey.SUBMIT_TIME.value, ended.job.meta[JobMetaKey.SUBMIT_TIME.value]
        with self.engine.new_context() as fl_ctx:
            family = self._family(ended, self._jobs().get_all_jobs(fl_ctx))
        return all(job.meta[own] <= at for job in family)

    @staticmethod
    def _family(ended: Ended, jobs: Iterable[Job]) -> list[Job]:
        led = {*(ended.record.folder / paths.JOBS).read_text("utf-8").split(), ended.job.job_id}
        return [job for job in jobs if led & {job.job_id, job.meta.get(JobMetaKey.CLONED_FROM.value)}]

    def _jobs(self) -> JobDefManagerSpec:
        return self.engine.get_component(SystemComponents.JOB_MANAGER)

    def _watch(self) -> None:
        while not self.engine.server.shutdown:
            for job_id, due in list(self.due.items()):
                with suppress(Exception):  # one look that fails is made good by the next
                    if self._is_time(due):
                        del self.due[job_id]
                        self._go_on(due.ended)
            time.sleep(LOOK)

    def _is_time(self, due: Due) -> bool:
        now, here = time.monotonic(), {client.name for client in self.engine.get_clients()}
        gathered = {*due.ended.rules.everyone} <= here or now > due.at + GATHER
        return now > due.at and gathered and due.ended.has_room()

    def _go_on(self, ended: Ended) -> None:
        if self._is_last(ended):  # nobody typed `medsilo resume` meanwhile
            with self.engine.new_context() as fl_ctx:
                self._jobs().clone(ended.job.job_id, ended.copy(), fl_ctx)
