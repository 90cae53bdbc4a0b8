"""Do the lead's work from afar, over NVFlare's own client API: submit, status, watch, resume, fetch ..."""

import io
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.api_spec import SystemInfo
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaKey, MetaStatusValue

from medsilo import __version__
from medsilo.check.kit import read_kit
from medsilo.core.errors import MedsiloError
from medsilo.core.text import is_safe_name, plain
from medsilo.runs import paths
from medsilo.runs.events import SILENCE
from medsilo.runs.paths import AFTER, CANCELS, GOES_ON, PROGRESS
from nvflare_reliability.kit_patches import connect

if TYPE_CHECKING:  # a poll that finds no study needs no models, whose making is a sixth of its time
    from medsilo.runs.rounds import Progress, Round
    from medsilo.runs.schema import Summary

COMPLETED, ABORTED = "FINISHED:COMPLETED", "FINISHED:ABORTED"
MEANT = {  # by states of a job that ended without a word of its own
    ABORTED: "somebody ended the job",
    "FINISHED:ABNORMAL": "the server, or its process for the job, was ended over it",
    "FINISHED:EXECUTION_EXCEPTION": "a process of the job died, at the server or at a hospital",
}
LACKING = "medsilo can't be imported"  # begins the reason of a hospital's guard (site_guard.py)
NO_REASON = "it left no reason; 'nvflare job logs' shows the server's log to a project_admin"
CONNECT = 10.0  # seconds NVFlare has to reach the server
POLL = 1.0  # seconds between looks at a running job
STARTING = 120.0  # seconds that submitting waits for a job to start
ENDING = 120.0  # seconds that aborting waits for a job's end
PATIENCE = 600.0  # seconds that watching goes on without a connection
NEXT = 4.0  # seconds after a job's death in which the server says whether its study goes on by itself
NOT_CLONED = ("scope", "launcher_spec")  # what NVFlare 2.9 leaves out of a clone of a job
SILENT = logging.NullHandler()  # what NVFlare says of a connection, our own line says
NOT_THERE = (  # what NVFlare raises where a job's controller can't be asked, or not by this person
    *(api_spec.JobNotFound, api_spec.JobNotRunning, api_spec.InternalError, api_spec.NoReply),
    api_spec.AuthorizationError,
)
Say = Callable[[str], None]
OnRound = Callable[["Round", "Progress"], None]  # a round, and the study that it is of


class Unreachable(MedsiloError):
    """The server does not answer; it may later."""


@contextmanager
def connected(kit: Path) -> Iterator[Session]:
    """A session with the server as the kit's owner; whatever NVFlare raises becomes an error of one line."""
    own = read_kit(kit, "person")
    logging.root.addHandler(SILENT)
    user, address = own.name, f"{own.host}:{own.port}"
    remedy = "; is it started, and the way to it open?"
    try:
        with redirect_stdout(io.StringIO()):  # it says that it connects
            session = connect(user, kit, CONNECT)
        remedy = " any more; did it end, or is its disk for temporary files full? its error_log.txt says why"
        try:
            yield session
        finally:
            session.close()
    except (MedsiloError, BrokenPipeError):
        raise
    except (api_spec.NoConnection, api_spec.SessionClosed, FLCommunicationError) as error:
        raise Unreachable(f"the server at {address} does not answer{remedy}") from error
    except api_spec.AuthorizationError as error:
        right = re.search(r"is not authorized for '(\w+)'", str(error))
        why = f"not authorized for {right[1]}" if right else error
        raise MedsiloError(
            f"{user} may not do this: {why}; leads submit jobs, and cancel and download their own"
        ) from error
    except api_spec.AuthenticationError as error:
        raise MedsiloError(f"the server at {address} does not accept {user}: {error}") from error
    except api_spec.JobNotFound as error:
        raise MedsiloError(
            f"{error}; 'medsilo status --kit {kit}' lists jobs; those of a study that 'nvflare study' made are for "
            "'nvflare job' with --study"
        ) from error
    except Exception as error:
        raise MedsiloError(f"NVFlare: {str(error).strip() or type(error).__name__}") from error


def submit(job: Path, kit: Path, say: Say, changes: Iterable[str] = (), other_plan: Path | None = None) -> str:
    """Check a job against its plan and against who is there, submit it, and return NVFlare's id for it.

    It has started then; when hospitals can't take part as agreed, it ends with the reason before anything is trained.
    """
    from medsilo.flare.jobs import check_components, plan_of, write_job  # what is heavy is imported where it is needed

    plan = plan_of(job, changes, other_plan)
    if plan.algorithm.pooled:
        raise MedsiloError(f"{plan.algorithm.name} pools all data and never runs between hospitals")
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / plan.algorithm.name
        write_job(packed, plan, job)
        check_components(packed)
        with connected(kit) as session:
            here = heard_lately(session.get_system_info())
            asked = set(plan.participation.sites) or here
            if len(asked & here) < plan.participation.required:
                wanted, there = (", ".join(sorted(names)) or "nobody" for names in (asked, here))
                raise MedsiloError(
                    f"not submitted: the plan needs {plan.participation.required} of {wanted}, and connected are "
                    f"{there}; start those who are missing, or change participation"
                )
            job_id = session.submit_job(str(packed))
        say(f"submitted as {job_id}; waits until the hospitals have joined")
        _await_start(kit, job_id, say, sorted(asked & here))
    return job_id


def _await_start(kit: Path, job_id: str, say: Say, sites: Collection[str] = ()) -> None:
    """Wait until the hospitals have joined; an error with the reason when the job ended before they had.

    sites: who is to take part in a new job; nobody is named where it goes on with a study.
    """
    deadline = time.monotonic() + STARTING
    while True:
        try:
            with connected(kit) as session:
                _watch_start(session, job_id, say, sites)
                return
        except Unreachable as error:  # a busy server may answer the next time
            if time.monotonic() > deadline:
                say(f"{job_id} is submitted, whether it started is not known: {error}")
                return
        time.sleep(POLL)


def _watch_start(session: Session, job_id: str, say: Say, sites: Collection[str]) -> None:
    deadline = time.monotonic() + STARTING
    while True:
        job = session.get_job_meta(job_id)
        if job["status"] == COMPLETED:
            return
        if _is_over(job["status"]):
            raise MedsiloError(_why_over(job, _left(session, job_id), sites))
        lacking = [said for said in obstacles(job) if job["status"] == "SUBMITTED" and LACKING in said]
        if lacking and sites:
            session.abort_job(job_id)
            raise MedsiloError(f"not started: {lacking[0]}")
        told = _so_far(session, job_id) if job["status"] == "RUNNING" else None
        if told is not None and told.absent is not None:
            for site, reason in told.absent.items():
                say(f"goes on without {site}: {reason}")
            return
        if time.monotonic() > deadline:
            waits = "; ".join(obstacles(job)) or "the hospitals have not joined yet"
            say(f"{job['status']}: {waits}; 'medsilo status {job_id} --watch' goes on looking")
            return
        time.sleep(POLL)


def _why_over(job: dict[str, Any], left: "Progress | None", sites: Collection[str]) -> str:
    """Return why a job ended before it was seen to run. left: how its study ended, if it had one."""
    why = [job["status"], *([left.reason] if left and left.reason else obstacles(job))]
    began = not sites or bool(left and left.rounds)
    if job["status"] != ABORTED and (len(why) == 1 or "was aborted" in why[1]):  # only NVFlare knows why
        unable = (
            f"one of {', '.join(sites)} can't run medsilo {__version__}: it is not installed there, or the policies "
            "forbid it; 'medsilo check --kit' at each says which"
        )
        why.append(MEANT.get(job["status"], NO_REASON) if began else unable)
    head = f"job {job['job_id']} has ended" if began else "not started"
    return f"{head}: {'; '.join(why)}"


def cancel(job_id: str, kit: Path, say: Say) -> str:
    """End a job and wait until it has ended, so that `resume` may follow at once; returns its final status."""
    with connected(kit) as session:
        with suppress(*NOT_THERE):
            session.do_app_command(job_id, PROGRESS, {CANCELS: read_kit(kit, "person").name})
        return cancel_in(session, job_id, say)


def cancel_in(session: Session, job_id: str, say: Say = lambda line: None) -> str:
    """Do the same in a session that is there."""
    session.abort_job(job_id)
    deadline, told = time.monotonic() + ENDING, False
    while not _is_over(status := str(session.get_job_meta(job_id)["status"])):
        if time.monotonic() > deadline:
            raise MedsiloError(
                f"job {job_id} is still {status}, {ENDING:g} s after the server was asked to end it; "
                f"'medsilo status {job_id} --watch' waits for its end"
            )
        if not told:
            say(f"waits until {job_id} has ended at the server")
        told = True
        time.sleep(POLL)
    return status


def resume(run: str, kit: Path, say: Say) -> str:
    """Go on with the study of a job that ended before it; `run` is that job's id, or a run that `fetch` brought.

    As with `submit`, the new job has started when its id is returned.

    The new job is a clone of the old one, and the server knows by that which study's checkpoint to take.
    """
    led = Path(run, paths.JOBS).read_text().split() if Path(run, paths.JOBS).exists() else []
    job_id = led[-1] if led else run
    with connected(kit) as session:
        job = session.get_job_meta(job_id)
        if job["status"] == COMPLETED:
            raise MedsiloError(f"job {job_id} is finished; there is nothing to resume")
        if not _is_over(job["status"]):
            raise MedsiloError(f"job {job_id} is {job['status']}; 'medsilo cancel {job_id}' ends it first")
        if gone := [key for key in NOT_CLONED if job.get(key)]:
            raise MedsiloError(
                f"NVFlare drops {gone[0]} of meta.json when it clones a job. Submit the job again with 'study' and "
                f"'resume': true in the controller's arguments (config_fed_server.json)"
            )
        new = session.clone_job(job_id)
    _await_start(kit, new, say)
    return new


@dataclass(frozen=True)
class JobState:
    """One job, as the server knows it."""

    id: str
    status: str
    name: str
    submitter: str
    submitted: str
    obstacles: tuple[str, ...] = ()  # why it waits or could not start

    def line(self) -> str:
        """Return the job in one line."""
        return "  ".join(part for part in (self.id, self.status, self.name, self.submitter, self.submitted) if part)


@dataclass(frozen=True)
class HospitalState:
    """One hospital: whether it answers now, and its part in the studies that run."""

    name: str
    connected: bool
    last_heard: float | None = None  # when the server heard it last, in seconds since 1970
    doing: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the hospital in one line."""
        at = self.last_heard
        heard = None if at is None else f"last heard {datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
        here = "connected" if self.connected else "NOT CONNECTED"
        return "; ".join([f"{self.name}: {here}", *filter(None, [heard]), *self.doing])


@dataclass(frozen=True)
class State:
    """The parties that are there and the jobs that run; of one job alone, that job."""

    jobs: tuple[JobState, ...]
    up_since: str | None = None
    hospitals: tuple[HospitalState, ...] = ()

    def lines(self) -> list[str]:
        """Return the state for people."""
        hospitals = [hospital.line() for hospital in self.hospitals]
        if self.up_since is None:
            return [*(line for job in self.jobs for line in (job.line(), *job.obstacles)), *hospitals]
        jobs = (line for job in self.jobs for line in (job.line(), *(f"  waits: {why}" for why in job.obstacles)))
        return [f"server: up since {self.up_since} UTC", *hospitals, *jobs]

    def as_json(self) -> dict[str, Any]:
        """Return the state for programs."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def status(kit: Path, job_id: str | None = None) -> State:
    """Return who is there and what runs, or one job."""
    with connected(kit) as session:
        info = session.get_system_info()
        here = heard_lately(info)
        if job_id:
            job = session.get_job_meta(job_id)
            one = _job_state(job, _waits(session, job_id, job["status"], here) or tuple(obstacles(job)))
            return State((one,), hospitals=_hospitals(session, info, [one]) if one.status == "RUNNING" else ())
        listed = session.list_jobs(detailed=True, reverse=True, limit=20)
        jobs = tuple(_job_state(job, _waits(session, job["job_id"], job["status"], here)) for job in listed)
        since = datetime.fromtimestamp(info.server_info.start_time, UTC)
        return State(jobs, f"{since:%Y-%m-%d %H:%M:%S}", _hospitals(session, info, jobs))


def _hospitals(session: Session, info: SystemInfo, jobs: Iterable[JobState]) -> tuple[HospitalState, ...]:
    """Return the hospitals that the server lists, which it does for minutes after they are gone, and those of studies
    that run. Each is asked, by the server."""
    heard = {client.name: client.last_connect_time for client in info.client_info}
    here = {name for name in sorted(heard_lately(info)) if _answers(session, name)}
    doing: dict[str, list[str]] = {name: [] for name in heard}
    for job in jobs:
        study = _so_far(session, job.id) if job.status == "RUNNING" else None
        for name, told in (_turns(study) if study else {}).items():
            doing.setdefault(name, []).append(told)
    return tuple(HospitalState(name, name in here, heard.get(name), tuple(own)) for name, own in sorted(doing.items()))


def heard_lately(info: SystemInfo) -> set[str]:
    """Return the hospitals whose heartbeats come, as the server's clock has them beside each other. A process whose kit
    was started once more is connected, and gets no job."""
    heard = {client.name: client.last_connect_time or 0.0 for client in info.client_info}
    newest = max(heard.values(), default=0.0)
    return {name for name, at in heard.items() if newest - at < SILENCE}


def _answers(session: Session, name: str) -> bool:
    """Return whether a hospital answers the server now. NVFlare 2.9 loses the answers of the others where it asks
    several, and one is gone."""
    try:
        told = session.get_client_job_status([name]) or []
    except (api_spec.NoConnection, api_spec.InternalError, api_spec.InvalidTarget):  # nothing within its time limit
        return False
    return any(reply.get(MetaKey.STATUS) != MetaStatusValue.NO_REPLY for reply in told)


def _turns(study: "Progress") -> dict[str, str]:
    """Return what each hospital of a study does, and since when."""
    if study.turns is None:
        return {}
    part = f"round {study.turns.round}" if study.turns.task == "round" else study.turns.task
    told = {}
    for name, turn in study.turns.sites.items():
        asked = "waits" if turn.asked is None else f"asked {turn.asked:.0f} s ago"
        state = asked if turn.answered is None else f"answered after {turn.answered:.0f} s"
        told[name] = f"{plain(study.study or 'a study', 80)}: {part} of {study.planned}, {state}"
    return told | {name: f"{told.get(name, part)}, {why}" for name, why in study.away.items()}


def _job_state(job: dict[str, Any], obstacles: tuple[str, ...] = ()) -> JobState:
    """Return a job as people read it: other leads named theirs."""
    said = (job.get("job_name") or job.get("name"), job.get("submitter_name"), job.get("submit_time_iso"))
    name, submitter, submitted = (plain(one or "", 200) for one in said)
    return JobState(job["job_id"], job["status"], name, submitter, submitted, obstacles)


def _waits(session: Session, job_id: str, status: str, here: Collection[str]) -> tuple[str, ...]:
    """Return why a job that was submitted has not started; nothing of one that has. here: who is connected."""
    if status != "SUBMITTED":
        return ()
    from medsilo.flare.admission import named_in

    job = session.get_job_meta(job_id)
    away = sorted(named_in(job.get("deploy_map")) - set(here))
    return (*([f"not connected: {plain(', '.join(away))}"] if away else []), *obstacles(job))


def obstacles(job: dict[str, Any]) -> list[str]:
    """Return why a job waits or could not start, as NVFlare's scheduler and the hospitals said."""
    if job["status"] == "SUBMITTED":
        return [plain(said.partition(": ")[2]) for said in job.get("schedule_history", [])[-1:]]  # without the time
    return [plain(said) for said in job.get("job_deploy_detail", []) if not said.endswith(": OK")]


def watch(
    job_id: str, kit: Path, on_round: OnRound, say: Say, on_progress: Callable[["Progress"], None] = lambda study: None
) -> tuple[str, str]:
    """Report rounds, from the server's own records, until the study ends; returns its last job and how that ended.

    on_progress: is told how far the study is, also between two rounds. A lost connection is made again; rounds that
    ended meanwhile are reported then. A study that went on, or is to go on by itself, is followed into its next job.
    """
    watching, heard = _Watching(job_id, on_round, say, on_progress), time.monotonic()
    while True:
        try:
            with connected(kit) as session:
                while (ended := watching.look(session)) is None:
                    heard = time.monotonic()
                    time.sleep(POLL)
                return watching.job_id, ended
        except Unreachable as error:
            if time.monotonic() - heard > PATIENCE:
                raise
            say(f"{error} Trying again")
            time.sleep(POLL)


@dataclass
class _Watching:
    """The last that a person who watches a job was told."""

    job_id: str
    on_round: OnRound
    say: Say
    on_progress: Callable[["Progress"], None] = lambda study: None
    reported: set[str] = field(default_factory=set)  # obstacles
    last: int = 0  # the last round
    planned: int | None = None
    died: float | None = None  # when its job was first seen to have ended otherwise than well

    def look(self, session: Session) -> str | None:
        """Tell what is new; returns the job's status when it is over."""
        job = session.get_job_meta(self.job_id)
        for line in obstacles(job):
            self._say_once(line)
        status = job["status"]
        if status == "RUNNING":
            # NVFlare goes on saying RUNNING for some seconds after the last round: there is nobody to ask then
            all_told = self.last == self.planned
            study = None if all_told else _so_far(session, self.job_id, self.last)
            if study is None and self.planned is None:
                self._say_once("no rounds yet: the job is starting, or somebody else submitted it")
            self._tell(study)
        if not _is_over(status) or (status != COMPLETED and self._goes_on(session, job)):
            return None
        # The last rounds were too quick to be told, or there are none, or it failed after them
        if self.last != self.planned or status != COMPLETED:
            study = None
            with suppress(api_spec.AuthorizationError):  # of those who may look on but not download
                study = _left(session, self.job_id)
            self._tell(study)
            if status != COMPLETED:
                self.say((study and study.reason) or MEANT.get(status, NO_REASON))
        return status

    def _goes_on(self, session: Session, job: dict[str, Any]) -> bool:
        """Return whether there is more to watch of a study whose job ended: its next job, or a time until there is."""
        self.died = self.died or time.monotonic()
        newer = session.list_jobs(detailed=True, reverse=True, limit=20)
        if found := [one["job_id"] for one in newer if one.get("cloned_from") == self.job_id]:
            self.job_id, self.died = found[0], None
            self.say(f"{job['status']}; the study goes on as {self.job_id}")
        elif told := job.get(GOES_ON):
            self._say_once(f"{job['status']}; the study goes on by itself, {plain(told, 40)} times, when all are back")
        else:
            return job["status"] != ABORTED and time.monotonic() - self.died < NEXT
        return True

    def _say_once(self, line: str) -> None:
        if line not in self.reported:
            self.say(line)
            self.reported.add(line)

    def _tell(self, study: "Progress | None") -> None:
        if study is None:
            return
        self.planned = study.planned
        self.on_progress(study)
        for line in study.rounds:
            if line.round <= self.last:
                continue
            if line.round > self.last + 1:
                self.say(
                    f"rounds {self.last + 1} to {line.round - 1} are over; 'medsilo download' brings what they gave"
                )
            self.on_round(line, study)
            self.last = line.round


def _is_over(status: str) -> bool:
    return status.startswith("FINISHED")


def _so_far(session: Session, job_id: str, after: int = 0) -> "Progress | None":
    """Return what the controller tells of the rounds after this one; nothing when the job is starting or just ends, and
    to nobody but who submitted it."""
    try:
        found = session.do_app_command(job_id, PROGRESS, {AFTER: after})
    except NOT_THERE:
        return None
    from pydantic import ValidationError

    from medsilo.runs.rounds import Progress

    try:
        return Progress.model_validate(found) if found else None
    except ValidationError as error:
        raise MedsiloError("the server writes its status in another form; install its version of medsilo") from error


def _left(session: Session, job_id: str) -> "Progress | None":
    """Return the same from what a job left when it was over; nothing where it left nothing."""
    from medsilo.runs.rounds import Progress

    ended, rounds, refusal = outcome_left(session, job_id)
    if ended is None:
        return Progress(planned=0, metric="", reason=refusal) if refusal else None
    return Progress(
        study=ended.study,
        planned=ended.rounds.planned,
        metric=ended.metric,
        steps={site: step for site, own in ended.sites.items() if (step := own.steps.get("validation"))},
        rounds=rounds,
        reason=ended.reason,
    )


def outcome_left(session: Session, job_id: str) -> "tuple[Summary | None, list[Round], str | None]":
    """Return what a job that is over left: its study's outcome and rounds; or, without a study, why it failed."""
    from medsilo.runs.reading import read_rounds, read_summary

    with tempfile.TemporaryDirectory() as folder:
        workspace = _download(session, job_id, Path(folder))
        run = _run_in(workspace)
        if run is None or not (run / paths.SUMMARY).exists():
            return None, [], _refusal_in(workspace)
        return read_summary(run), read_rounds(run, True), None


def _download(session: Session, job_id: str, folder: Path) -> Path:
    """Download what a job left."""
    return Path(session.download_job_result(job_id, str(folder))) / "workspace"


def _run_in(workspace: Path) -> Path | None:
    """Return the run's folder among what a job left, if there is one."""
    runs = [path for path in workspace.glob("medsilo/*") if path.is_dir() and is_safe_name(path.name)]
    return runs[0] if len(runs) == 1 else None


def _refusal_in(workspace: Path) -> str | None:
    """Return why a job failed, as its controller left it, also when it led no study."""
    path = workspace / paths.REFUSED
    return plain(path.read_text("utf-8", "replace")) if path.is_file() else None


def download(job_id: str, kit: Path, out: Path) -> Path:
    """Download a finished job's results into a run folder under `out`; returns it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fetching-") as folder, connected(kit) as session:
        status = str(session.get_job_status(job_id))
        if not _is_over(status):
            raise MedsiloError(f"job {job_id} is {status}; 'medsilo status {job_id} --watch' waits for its end")
        run = _run_in(_download(session, job_id, Path(folder)))
        if run is None or not (run / paths.SUMMARY).exists():
            raise MedsiloError(
                f"job {job_id} ({status}) left no results: it ended before its study did; "
                "'nvflare job logs' shows the server's log to a project_admin"
            )
        if not (out / run.name).exists():
            return Path(shutil.move(run, out / run.name))
        _check_earlier(out / run.name, run)
        return Path(shutil.copytree(run, out / run.name, dirs_exist_ok=True))


def _check_earlier(own: Path, run: Path) -> None:
    """Raise MedsiloError unless a folder is an earlier download of this study, whose files newer ones replace."""
    before, now = (
        (path / paths.JOBS).read_text().split() if (path / paths.JOBS).is_file() else [] for path in (own, run)
    )
    led_on = before and before == now[: len(before)]
    if not led_on or own.is_symlink() or any(path.is_symlink() for path in own.rglob("*")):
        raise MedsiloError(f"{own} exists, and is no earlier download of this study; choose another --out")
