"""Continue each study whose job was interrupted, as often as the study's plan allows.

This component runs in the server's parent process. When all hospitals of the study are connected again, the component
submits a copy of the job, as `medsilo resume` does.
"""

import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job, JobMetaKey, RunStatus
from nvflare.apis.job_def_manager_spec import JobDefManagerSpec

from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain
from medsilo.core.yaml_text import load_yaml
from medsilo.flare.certificates import CertificateEnds
from medsilo.flare.workspace import kit_folder, output_folder, settings_of_server
from medsilo.runs import event_reading, paths
from medsilo.runs.ends import COMPLETED, ENDS, end_of, goes_on, is_over
from medsilo.runs.events import NOT_APPROVED, Event, What, write
from medsilo.runs.paths import GOES_ON, OUTCOME
from medsilo.schedule.participation import Participation
from medsilo_server.record import Record
from nvflare_reliability.kit_patches import hear_of_aborts

DIED = tuple(status for status, end in ENDS.items() if end.passes)
OF_ONE_JOB = (
    JobMetaKey.JOB_ID,
    JobMetaKey.JOB_DEPLOY_DETAIL,
    JobMetaKey.SCHEDULE_COUNT,
    JobMetaKey.LAST_SCHEDULE_TIME,
    JobMetaKey.SCHEDULE_HISTORY,
    JobMetaKey.JOB_CLIENTS,
)
# key in a job's metadata under which automatic resumptions are listed, each with its time and the last completed round
TIMES = "resumed"
# A resumption stops counting after a day (in seconds), or as soon as this number of further rounds is complete.
DAY, PROGRESS = 86_400.0, 10
MOST_TIMES = 100  # maximum number of resumptions in the list; the plan's key participation.resume has the same maximum
LOOK = 2.0
# maximum bytes of the reason in an event about an interruption; the rest of the event is for the next step
WHY = 400
# Seconds before the first attempt to resume a study, and maximum seconds before a later attempt. Each pause is twice as
# long as the previous pause.
PAUSE, LONGEST = 10.0, 600.0
GATHER = 180.0  # seconds for which a resumed study waits for hospitals that are absent
ROOM, LEAST_ROOM = 2, 1 << 20  # the disk needs free space for twice the bytes of the checkpoints, plus 1 MiB


@dataclass(frozen=True)
class Ended:
    job: Job
    record: Record
    rules: Participation

    @cached_property
    def done(self) -> int:
        return max((line.round for line in self.record.rounds()), default=0)

    @property
    def earlier(self) -> list[tuple[float, int]]:
        """The automatic resumptions that count towards the limit, each with its time and the index of the last round
        before the resumption.
        """
        # the list of resumptions may be invalid, because a lead writes the metadata of the first job
        told = self.job.meta.get(TIMES)
        found, now = list[tuple[float, int]](), time.time()
        for one in told[-MOST_TIMES:] if isinstance(told, list) else ():
            match one:
                case [float(at), int(after)] if now - at < DAY and self.done < after + PROGRESS:
                    found.append((at, after))
        return found

    @property
    def times(self) -> int:
        return len(self.earlier)

    @property
    def pause(self) -> float:
        """The seconds between the end of the job and the next attempt to resume its study."""
        return min(PAUSE * 2**self.times, LONGEST)

    @property
    def silence(self) -> float:
        signs = (self.record.folder / name for name in (paths.JOBS, paths.ROUNDS, paths.NOW))
        return max(0.0, time.time() - max(path.stat().st_mtime for path in signs if path.exists()))

    @property
    def turn(self) -> str:
        """The index of the next attempt and the maximum number of attempts, such as "1 of 3"."""
        return f"{self.times + 1} of {self.rules.resume}"

    @property
    def hopeless(self) -> str:
        if not self.rules.resume:
            return "participation.resume is 0"
        if self.times >= self.rules.resume:
            return (
                f"it went on by itself {self.times} times within a day, and did not come {PROGRESS} rounds further "
                "(participation.resume)"
            )
        if not (self.record.finished() or self.record.can_go_on()):
            return "there is no checkpoint to go on from"
        return "" if self._passes else "somebody has to mend what ended it"

    @property
    def _passes(self) -> bool:
        """True if the cause of the interruption is temporary or unknown.

        A starting job is added to the list of jobs in the run folder. A summary that is older than the list of jobs in
        the run folder belongs to an earlier job.
        """
        told, begun = self.record.folder / paths.SUMMARY, self.record.folder / paths.JOBS
        summary = self.record.summary()
        if summary is None or told.stat().st_mtime < begun.stat().st_mtime:
            return True
        return summary.finished or summary.passing

    def has_room(self) -> bool:
        taken = sum(path.stat().st_size for path in self.record.checkpoints.glob("*"))
        return shutil.disk_usage(self.record.folder).free > ROOM * taken + LEAST_ROOM

    def copy(self) -> dict[str, Any]:
        left = {GOES_ON, OUTCOME, *(key.value for key in OF_ONE_JOB)}
        own = {key: value for key, value in self.job.meta.items() if key not in left}
        led = (self.record.folder / paths.JOBS).read_text("utf-8").split()
        of = self.job.job_id if self.job.job_id in led else own[JobMetaKey.CLONED_FROM.value]
        now = [time.time(), self.done]
        return own | {JobMetaKey.CLONED_FROM.value: of, TIMES: [*map(list, self.earlier), now]}


@dataclass(frozen=True)
class DueRestart:
    ended: Ended
    at: float  # earliest time at which the study continues, by the monotonic clock


class ResumedStudies(FLComponent):
    """Writes an event about each job that failed or was interrupted, and continues the job's study if possible."""

    def __init__(self) -> None:
        super().__init__()
        self.resuming: Resuming | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            studies = output_folder(fl_ctx, settings_of_server(fl_ctx))
            self.resuming = Resuming(fl_ctx.get_engine(), kit_folder(fl_ctx), studies)
            self.resuming.begin()
            hear_of_aborts(self.resuming.cancel)
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED) and self.resuming:
            self.resuming.ended(fl_ctx)


class Resuming:
    def __init__(self, engine: Any, kit: Path, studies: Path) -> None:
        self.engine, self.kit, self.studies = engine, kit, studies
        self.due: dict[str, DueRestart] = {}

    def begin(self) -> None:
        fates = event_reading.fates(self.kit)
        with self.engine.new_context() as fl_ctx:
            for job in self._jobs().get_jobs_by_status(list(DIED), fl_ctx):
                self.take(job, "the server, or its process for the job, was ended", fates.get(job.job_id), earlier=True)
        threading.Thread(target=self._watch, daemon=True).start()

    def ended(self, fl_ctx: FLContext) -> None:
        job_id = str((fl_ctx.get_prop(FLContextKey.EVENT_DATA) or {}).get("job_id", ""))
        job = self._jobs().get_job(job_id, fl_ctx) if job_id else None
        status = str(job.meta.get(JobMetaKey.STATUS.value, "")) if job else ""
        if job and is_over(status) and status != COMPLETED:
            self._say_why(job_id)
            fate = event_reading.fates(self.kit).get(job_id, "began")
            # True if the last event is about a failure, and the job itself, not this component, wrote this event
            own = fate == "failed" and job_id not in self.due
            why = plain(event_reading.last_words(self.kit, job_id), WHY) if own else ""
            self.take(job, why or end_of(status).words, fate)

    def _say_why(self, job_id: str) -> None:
        """Write the reason why a job failed into the job's metadata, where the lead can read it."""
        if why := event_reading.last_words(self.kit, job_id):
            outcome = "refused: not approved" if NOT_APPROVED in why else f"failed: {why}"
            with suppress(Exception), self.engine.new_context() as fl_ctx:
                self._jobs().update_meta(job_id, {OUTCOME: outcome}, fl_ctx)

    def take(self, job: Job, why: str, fate: str | None, earlier: bool = False) -> None:
        """Schedule the continuation of a job's study if a continuation is possible, and write an event.

        Args:
            fate: The kind of the last event about the job, or None.
            earlier: True if the job ended before this server started. In this case, the pause began when the job ended.
        """
        # an error means that the run folder is damaged; the study is then not scheduled, because a person must repair
        # the folder
        with suppress(MedsiloError, OSError, ValueError, LookupError, TypeError):
            ended = self._study_of(job)
            if ended and not self._is_last(ended):
                return
            if ended and not ended.hopeless:
                pause = max(0.0, ended.pause - ended.silence) if earlier else ended.pause
                self.due[job.job_id] = DueRestart(ended, time.monotonic() + pause)
                told = f"{why}; {goes_on(pause, ended.turn)}"
                what: What = "waits" if fate in event_reading.LAST else "failed"
                write(self.kit, Event(what, told, study=ended.record.folder.name, job=job.job_id))
                # Users see the time of the next attempt in the job's metadata. Errors are ignored, because the disk may
                # be full.
                with suppress(Exception), self.engine.new_context() as fl_ctx:
                    own = {GOES_ON: {"at": time.time() + pause, "turn": ended.turn}}
                    self._jobs().update_meta(job.job_id, own, fl_ctx)
                return
            if ended and ended.rules.resume:
                why = f"{why}; {ended.hopeless}"
        if fate in event_reading.RUNNING:
            somebody = end_of(str(job.meta.get(JobMetaKey.STATUS.value))).needs_somebody
            write(self.kit, Event("failed" if somebody else "ended", why, job=job.job_id, needs_somebody=somebody))

    def cancel(self, job_id: str, who: str) -> None:
        due = self.due.pop(job_id, None)
        if due is None:
            return
        with self.engine.new_context() as fl_ctx:
            self._jobs().update_meta(job_id, {GOES_ON: None}, fl_ctx)
            self._jobs().set_status(job_id, RunStatus.FINISHED_ABORTED, fl_ctx)
        told = f"{plain(who, 80)} cancelled it while it waited to go on"
        write(self.kit, Event("ended", told, study=due.ended.record.folder.name, job=job_id, needs_somebody=False))

    def _study_of(self, job: Job) -> Ended | None:
        """Return the study that an interrupted job led or should have continued, or None."""
        if job.meta.get(JobMetaKey.STATUS.value) not in DIED:
            return None
        of = (job.job_id, str(job.meta.get(JobMetaKey.CLONED_FROM.value, "")))
        record = next((found for own in of if own and (found := Record.of_job(self.studies, own))), None)
        if record is None:
            return None
        plan = load_yaml((record.folder / paths.PLAN).read_text("utf-8"))
        return Ended(job, record, Participation.model_validate(plan["participation"]))

    def _is_last(self, ended: Ended) -> bool:
        """Return True if no newer job leads the study or waits to lead it."""
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
                with suppress(Exception):
                    # the study may not be due any more, because a user may have cancelled the study while the thread
                    # waited
                    if self._is_time(due) and self.due.pop(job_id, None) is not None:
                        self._go_on(due.ended)
            time.sleep(LOOK)

    def _is_time(self, due: DueRestart) -> bool:
        now, here = time.monotonic(), {client.name for client in self.engine.get_clients()}
        gathered = {*due.ended.rules.everyone} <= here or now > due.at + GATHER
        valid = not CertificateEnds(self.kit).ended(due.ended.rules.everyone, time.time())
        return now > due.at and gathered and due.ended.has_room() and valid

    def _go_on(self, ended: Ended) -> None:
        if self._is_last(ended):  # a user may have resumed the study with `medsilo resume` while the thread waited
            with self.engine.new_context() as fl_ctx:
                self._jobs().clone(ended.job.job_id, ended.copy(), fl_ctx)
