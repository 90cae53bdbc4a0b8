"""The commands with which a lead controls jobs over NVFlare's client API: submit, status, watch, resume, download,
cancel.
"""

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

from medsilo.check.kit import read_kit
from medsilo.core.errors import MedsiloError
from medsilo.core.text import is_safe_name, plain
from medsilo.core.version import __version__
from medsilo.runs import paths
from medsilo.runs.ends import ABORTED, COMPLETED, COULD_NOT_START, end_of, goes_on, is_over
from medsilo.runs.events import SILENCE
from medsilo.runs.paths import AFTER, CANCELS, GOES_ON, OUTCOME, PROGRESS
from nvflare_reliability.kit_patches import connect

# These modules are imported only for type checkers, because the import would take a sixth of the time of `status`.
if TYPE_CHECKING:
    from medsilo.runs.rounds import Progress, Round
    from medsilo.runs.schema import Summary

LACKING = "medsilo can't be imported"  # the first words of an error message of site_guard.py
CONNECT = 10.0
POLL = 1.0
STARTING = 120.0
ENDING = 120.0
ANSWER = 30.0  # seconds until a busy server's answer counts as lost; NVFlare's default is 5
PATIENCE = 600.0  # after a lost connection, the number of seconds for which `watch` tries to connect again
# of the latest LISTED jobs, `status` shows SHOWN jobs; running jobs come first
SHOWN, LISTED = 20, 200
# if a failed job's study will restart automatically, the server announces the restart within this number of seconds
NEXT = 4.0
NOT_CLONED = ("scope", "launcher_spec")  # metadata keys that NVFlare 2.9 does not copy from a job to its clone
# hides NVFlare's log messages about a connection, because medsilo writes its own messages
SILENT = logging.NullHandler()
NOT_THERE = (  # NVFlare raises these errors if a job's controller is unreachable, or if the user lacks a permission
    *(api_spec.JobNotFound, api_spec.JobNotRunning, api_spec.InternalError, api_spec.NoReply),
    api_spec.AuthorizationError,
)
Say = Callable[[str], None]
OnRound = Callable[["Round", "Progress"], None]


class Unreachable(MedsiloError):
    """The consortium's server did not answer. A later attempt to connect may succeed."""


@contextmanager
def connected(kit: Path, answer: float | None = None) -> Iterator[Session]:
    """Open a session with the server as the person to whom the kit belongs. Errors of NVFlare are raised as
    MedsiloError with a message of one line.

    Args:
        answer: seconds until the server's answer to a command counts as lost; None: NVFlare's default
    """
    own = read_kit(kit, "person")
    logging.root.addHandler(SILENT)
    user, address = own.name, f"{own.host}:{own.port}"
    remedy = "; is it started, and the way to it open?"
    try:
        with redirect_stdout(io.StringIO()):
            session = connect(user, kit, CONNECT)
        if answer:
            session.set_timeout(answer)
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
            f"{user} may not do this: {why}; leads submit jobs, and cancel and download only their own jobs"
        ) from error
    except api_spec.AuthenticationError as error:
        raise MedsiloError(f"the server at {address} does not accept {user}: {error}") from error
    except api_spec.JobNotFound as error:
        raise MedsiloError(
            f"{error}; 'medsilo status --kit {kit}' lists jobs; for a job in a study of 'nvflare study', use "
            "'nvflare job' with --study"
        ) from error
    except Exception as error:
        raise MedsiloError(f"NVFlare: {str(error).strip() or type(error).__name__}") from error


def submit(job: Path, kit: Path, say: Say, changes: Iterable[str] = (), other_plan: Path | None = None) -> str:
    """Check a job against its plan and the connected hospitals, submit the job, and return NVFlare's job id.

    The function returns as soon as the job has started. If a hospital cannot take part under the agreed conditions, the
    job ends before any training, and the error message contains the reason.
    """
    from medsilo.flare.jobs import plan_of
    from medsilo_lab.jobs import check_components, write_job  # defers the import of slow modules

    plan = plan_of(job, changes, other_plan)
    if plan.algorithm.pooled:
        raise MedsiloError(f"{plan.algorithm.name} pools all data, so it can't run in a consortium")
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / plan.algorithm.name
        write_job(packed, plan, job)
        check_components(packed)
        with connected(kit, ANSWER) as session:
            here = heard_lately(session.get_system_info())
            asked = set(plan.participation.sites) or here
            if len(asked & here) < plan.participation.required:
                wanted, there = (", ".join(sorted(names)) or "nobody" for names in (asked, here))
                raise MedsiloError(
                    f"not submitted: the plan needs {plan.participation.required} of {wanted}, but only these are "
                    f"connected: {there}; start the missing hospitals, or change participation"
                )
            job_id = session.submit_job(str(packed))
        say(f"submitted as {job_id}; waits until the hospitals have joined")
        _await_start(kit, job_id, say, sorted(asked & here))
    return job_id


def _await_start(kit: Path, job_id: str, say: Say, sites: Collection[str] = ()) -> None:
    deadline = time.monotonic() + STARTING
    while True:
        try:
            with connected(kit) as session:
                _watch_start(session, job_id, say, sites)
                return
        except Unreachable as error:  # a busy server may be able to answer the next query
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
        if is_over(job["status"]):
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
    """Return the reason why a job ended before this program saw the job running. `left` is the progress of the job's
    study, if the study began.
    """
    why = [job["status"], *([left.reason] if left and left.reason else obstacles(job))]
    began = not sites or bool(left and left.rounds)
    # without a recorded reason, the status is the only fact about the end of the job
    if job["status"] != ABORTED and (len(why) == 1 or "was aborted" in why[1]):
        unable = (
            f"one of {', '.join(sites)} can't run medsilo {__version__}: it is not installed there, or the policies "
            "forbid it; 'medsilo check --kit' at each says which"
        )
        why.append(end_of(job["status"]).words if began else unable)
    head = f"job {job['job_id']} has ended" if began else "not started"
    return f"{head}: {'; '.join(why)}"


def cancel(job_id: str, kit: Path, say: Say) -> str:
    """Stop a job, and wait until the job has ended, because `resume` can only continue an ended job. Return the final
    status of the job.
    """
    with connected(kit, ANSWER) as session:
        with suppress(*NOT_THERE):
            session.do_app_command(job_id, PROGRESS, {CANCELS: read_kit(kit, "person").name})
        return cancel_in(session, job_id, say)


def cancel_in(session: Session, job_id: str, say: Say = lambda line: None) -> str:
    session.abort_job(job_id)
    deadline, told = time.monotonic() + ENDING, False
    while not is_over(status := str(session.get_job_meta(job_id)["status"])):
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
    """Continue the study of an ended job. `run` is the id of the job, or a run folder that `download` wrote.

    Like `submit`, this function waits until the new job has started, and returns the id of the new job.

    The new job is a clone of the ended job. From the id of the ended job, the server finds the study and its
    checkpoint.
    """
    led = Path(run, paths.JOBS).read_text().split() if Path(run, paths.JOBS).exists() else []
    job_id = led[-1] if led else run
    with connected(kit, ANSWER) as session:
        job = session.get_job_meta(job_id)
        if job["status"] == COMPLETED:
            raise MedsiloError(f"job {job_id} is finished; there is nothing to resume")
        if not is_over(job["status"]):
            raise MedsiloError(f"job {job_id} is {job['status']}; 'medsilo cancel {job_id}' ends it first")
        if gone := [key for key in NOT_CLONED if job.get(key)]:
            raise MedsiloError(
                f"the job can't be resumed, because NVFlare does not copy {gone[0]} from meta.json. Submit the job "
                f"again with 'study' and 'resume': true in the controller's arguments (config_fed_server.json)"
            )
        new = session.clone_job(job_id)
    _await_start(kit, new, say)
    return new


@dataclass(frozen=True)
class JobState:
    id: str
    status: str
    name: str
    submitter: str
    submitted: str
    obstacles: tuple[str, ...] = ()
    goes_on: str = ""
    outcome: str = ""

    def line(self) -> str:
        told = (self.id, self.outcome or self.status, self.goes_on, self.name, self.submitter, self.submitted)
        return "  ".join(filter(None, told))

    def reasons(self) -> list[str]:
        return [f"  {'because' if is_over(self.status) else 'waits'}: {why}" for why in self.obstacles]


@dataclass(frozen=True)
class HospitalState:
    """The state of a hospital: whether the hospital is connected, and the hospital's current task in each running
    study.
    """

    name: str
    connected: bool
    last_heard: float | None = None  # time of the hospital's last message, in seconds since 1970
    doing: tuple[str, ...] = ()

    def line(self) -> str:
        at = self.last_heard
        heard = None if at is None else f"last heard {datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
        here = "connected" if self.connected else "NOT CONNECTED"
        return "; ".join([f"{self.name}: {here}", *filter(None, [heard]), *self.doing])


@dataclass(frozen=True)
class State:
    jobs: tuple[JobState, ...]
    up_since: str | None = None
    hospitals: tuple[HospitalState, ...] = ()

    def lines(self) -> list[str]:
        hospitals = [hospital.line() for hospital in self.hospitals]
        if self.up_since is None:
            return [*(line for job in self.jobs for line in (job.line(), *job.obstacles)), *hospitals]
        jobs = (line for job in self.jobs for line in (job.line(), *job.reasons()))
        return [f"server: up since {self.up_since} UTC", *hospitals, *jobs]

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def status(kit: Path, job_id: str | None = None) -> State:
    with connected(kit) as session:
        info = session.get_system_info()
        here = heard_lately(info)
        if job_id:
            job = session.get_job_meta(job_id)
            newer = _listed(session) if job.get(GOES_ON) else ()
            one = _job_state(job, _reasons(session, job, here) or tuple(obstacles(job)), newer)
            return State((one,), hospitals=_hospitals(session, info, [one]) if one.status == "RUNNING" else ())
        listed = _listed(session)
        shown = sorted(listed, key=lambda job: (job["status"] != "RUNNING", is_over(job["status"])))[:SHOWN]
        jobs = tuple(_job_state(job, _reasons(session, job, here), listed) for job in shown)
        since = datetime.fromtimestamp(info.server_info.start_time, UTC)
        return State(jobs, f"{since:%Y-%m-%d %H:%M:%S}", _hospitals(session, info, jobs))


def _hospitals(session: Session, info: SystemInfo, jobs: Iterable[JobState]) -> tuple[HospitalState, ...]:
    """Return the state of every hospital that the server lists or that participates in a running study.

    Each hospital is queried, because the server lists a disconnected hospital for some minutes.
    """
    heard = {client.name: client.last_connect_time for client in info.client_info}
    here = {name for name in sorted(heard_lately(info)) if _answers(session, name)}
    doing: dict[str, list[str]] = {name: [] for name in heard}
    for job in jobs:
        study = _so_far(session, job.id) if job.status == "RUNNING" else None
        for name, told in (_turns(study) if study else {}).items():
            doing.setdefault(name, []).append(told)
    return tuple(HospitalState(name, name in here, heard.get(name), tuple(own)) for name, own in sorted(doing.items()))


def heard_lately(info: SystemInfo) -> set[str]:
    """Return the connected hospitals: their last heartbeat is less than SILENCE seconds older than the latest heartbeat
    of any hospital.

    If a hospital's kit was started twice, the second process is connected to the server but gets no job.
    """
    heard = {client.name: client.last_connect_time or 0.0 for client in info.client_info}
    newest = max(heard.values(), default=0.0)
    return {name for name, at in heard.items() if newest - at < SILENCE}


def _answers(session: Session, name: str) -> bool:
    """Return True if a hospital answers a query of the server.

    Each hospital gets a separate query, because NVFlare 2.9 loses the answers of all queried hospitals if one of them
    is disconnected.
    """
    try:
        told = session.get_client_job_status([name]) or []
    # a disconnected or busy hospital does not answer in time
    except (api_spec.NoConnection, api_spec.InternalError, api_spec.InvalidTarget):
        return False
    return any(reply.get(MetaKey.STATUS) != MetaStatusValue.NO_REPLY for reply in told)


def _turns(study: "Progress") -> dict[str, str]:
    if study.turns is None:
        return {}
    part = f"round {study.turns.round}" if study.turns.task == "round" else study.turns.task
    told = {}
    for name, turn in study.turns.sites.items():
        asked = "waits" if turn.asked is None else f"asked {turn.asked:.0f} s ago"
        state = asked if turn.answered is None else f"answered after {turn.answered:.0f} s"
        told[name] = f"{plain(study.study or 'a study', 80)}: {part} of {study.planned}, {state}"
    return told | {name: f"{told.get(name, part)}, {why}" for name, why in study.away.items()}


def _listed(session: Session) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = session.list_jobs(detailed=True, reverse=True, limit=LISTED)
    return found


def waits_to_go_on(job: dict[str, Any]) -> str:
    """Return the time at which a failed job's study restarts automatically, or an empty text if there is no automatic
    restart.
    """
    match job.get(GOES_ON):
        case {"at": float(at), "turn": str(turn)}:
            return goes_on(at - time.time(), plain(turn, 40))
    return ""


def _job_state(job: dict[str, Any], obstacles: tuple[str, ...] = (), others: Iterable[dict[str, Any]] = ()) -> JobState:
    """Return the state of a job, with the name of the lead who submitted the job. If a job in `others` continues the
    study of `job`, no automatic restart is reported.
    """
    said = (job.get("job_name") or job.get("name"), job.get("submitter_name"), job.get("submit_time_iso"))
    name, submitter, submitted = (plain(one or "", 200) for one in said)
    own, status = job["job_id"], job["status"]
    due = "" if any(own == other.get("cloned_from") for other in others) else waits_to_go_on(job)
    outcome = plain(job.get(OUTCOME) or "", 200) if is_over(status) else ""
    return JobState(own, status, name, submitter, submitted, obstacles, due, outcome)


def _reasons(session: Session, job: dict[str, Any], here: Collection[str]) -> tuple[str, ...]:
    """Return the reasons why a job waits or could not start, given the connected hospitals `here`."""
    if job["status"] not in ("SUBMITTED", COULD_NOT_START):
        return ()
    whole = session.get_job_meta(job["job_id"])
    if is_over(job["status"]):
        return tuple(obstacles(whole))
    from medsilo_server.flare.admission import named_in

    away = sorted(named_in(whole.get("deploy_map")) - set(here))
    return (*([f"not connected: {plain(', '.join(away))}"] if away else []), *obstacles(whole))


def obstacles(job: dict[str, Any]) -> list[str]:
    """Return the reasons for which a job waits or could not start, as NVFlare's scheduler or the hospitals
    report them.
    """
    if job["status"] == "SUBMITTED":
        # NVFlare's line begins with a time, which is removed
        return [plain(said.partition(": ")[2]) for said in job.get("schedule_history", [])[-1:]]
    return [plain(said) for said in job.get("job_deploy_detail", []) if not said.endswith(": OK")]


def watch(
    job_id: str, kit: Path, on_round: OnRound, say: Say, on_progress: Callable[["Progress"], None] = lambda study: None
) -> tuple[str, str]:
    """Report each round from the server's records until the study ends. Return the id and the final status of the
    study's last job.

    After a lost connection, this function connects again and reports the missed rounds. If the study restarts
    automatically in a new job, this function watches the new job. Between the ends of two rounds, `on_progress` also
    receives the progress of the study.
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
    job_id: str
    on_round: OnRound
    say: Say
    on_progress: Callable[["Progress"], None] = lambda study: None
    reported: set[str] = field(default_factory=set)
    last: int = 0
    planned: int | None = None
    died: float | None = None

    def look(self, session: Session) -> str | None:
        """Report the progress of the job since the last call. Return the job's status if the job has ended, otherwise
        None.
        """
        job = session.get_job_meta(self.job_id)
        for line in obstacles(job):
            self._say_once(line)
        status = job["status"]
        if status == "RUNNING":
            # for some seconds after the last round, NVFlare reports that the job runs, although the controller has
            # ended
            all_told = self.last == self.planned
            study = None if all_told else _so_far(session, self.job_id, self.last)
            if study is None and self.planned is None:
                self._say_once("no rounds yet: the job is starting, or somebody else submitted it")
            self._tell(study)
        if not is_over(status) or (status != COMPLETED and self._goes_on(session, job)):
            return None
        # Some rounds may not have been reported, because a round was very short, or because the job ended soon after a
        # round.
        if self.last != self.planned or status != COMPLETED:
            study = None
            with suppress(api_spec.AuthorizationError):  # some users may watch a job but may not download its files
                study = _left(session, self.job_id)
            self._tell(study)
            if status != COMPLETED:
                self.say((study and study.reason) or end_of(status).words)
        return status

    def _goes_on(self, session: Session, job: dict[str, Any]) -> bool:
        """Return True if the study of an ended job continues in another job or will restart automatically."""
        self.died = self.died or time.monotonic()
        newer = session.list_jobs(detailed=True, reverse=True, limit=20)
        if found := [one["job_id"] for one in newer if one.get("cloned_from") == self.job_id]:
            self.job_id, self.died = found[0], None
            self.say(f"{job['status']}; the study goes on as {self.job_id}")
        elif told := waits_to_go_on(job):
            self._say_once(f"{job['status']}; the study {told}")
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


def _so_far(session: Session, job_id: str, after: int = 0) -> "Progress | None":
    """Return the controller's report on the rounds after round `after`. Return None while the job starts or ends, or if
    another user submitted the job.
    """
    try:
        found = session.do_app_command(job_id, PROGRESS, {AFTER: after})
    except NOT_THERE:
        return None
    from pydantic import ValidationError

    from medsilo.runs.rounds import Progress

    try:
        return Progress.model_validate(found) if found else None
    except ValidationError as error:
        raise MedsiloError(
            "this version of medsilo cannot read the server's status; install the server's version of medsilo"
        ) from error


def _left(session: Session, job_id: str) -> "Progress | None":
    """Return a report on all rounds from the files of an ended job, or None if the job has no files."""
    from medsilo.runs.rounds import Progress

    ended, rounds, refusal = outcome_left(session, job_id)
    if ended is None:
        return Progress(planned=0, metric="", reason=refusal) if refusal else None
    return Progress(
        study=ended.study,
        planned=ended.rounds.planned,
        metric=ended.metric,
        rounds=rounds,
        reason=ended.reason,
    )


def outcome_left(session: Session, job_id: str) -> "tuple[Summary | None, list[Round], str | None]":
    """Return the summary and the rounds of the study of an ended job. For a job without a study, return the reason why
    the job failed.
    """
    from medsilo.runs.reading import read_rounds, read_summary

    with tempfile.TemporaryDirectory() as folder:
        workspace = _download(session, job_id, Path(folder))
        run = _run_in(workspace)
        if run is None or not (run / paths.SUMMARY).exists():
            return None, [], _refusal_in(workspace)
        return read_summary(run), read_rounds(run, True), None


def _download(session: Session, job_id: str, folder: Path) -> Path:
    return Path(session.download_job_result(job_id, str(folder))) / "workspace"


def _run_in(workspace: Path) -> Path | None:
    runs = [path for path in workspace.glob("medsilo/*") if path.is_dir() and is_safe_name(path.name)]
    return runs[0] if len(runs) == 1 else None


def _refusal_in(workspace: Path) -> str | None:
    """If a job failed, return the reason, which the controller writes into a file. The file exists even if no study
    began.
    """
    path = workspace / paths.REFUSED
    return plain(path.read_text("utf-8", "replace")) if path.is_file() else None


def download(job_id: str, kit: Path, out: Path) -> Path:
    """Download the results of an ended job into a new folder inside `out`, and return this folder."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fetching-") as folder, connected(kit, ANSWER) as session:
        status = str(session.get_job_status(job_id))
        if not is_over(status):
            raise MedsiloError(f"job {job_id} is {status}; 'medsilo status {job_id} --watch' waits for its end")
        run = _run_in(_download(session, job_id, Path(folder)))
        if run is None or not (run / paths.SUMMARY).exists():
            raise MedsiloError(
                f"job {job_id} ({status}) left no results, because the job ended before its study began; "
                "'nvflare job logs' shows the server's log to a project_admin"
            )
        if not (out / run.name).exists():
            return Path(shutil.move(run, out / run.name))
        _check_earlier(out / run.name, run)
        return Path(shutil.copytree(run, out / run.name, dirs_exist_ok=True))


def _check_earlier(folder: Path, run: Path) -> None:
    """Raise MedsiloError unless the existing folder `folder` is an earlier download of the study in `run`."""
    before, now = (
        (path / paths.JOBS).read_text().split() if (path / paths.JOBS).is_file() else [] for path in (folder, run)
    )
    led_on = before and before == now[: len(before)]
    if not led_on or folder.is_symlink() or any(path.is_symlink() for path in folder.rglob("*")):
        raise MedsiloError(f"{folder} exists, and is not an earlier download of this study; choose another --out")
