"""What the consortium's lead does from afar, over NVFlare's own client API: submit, status, watch, abort, fetch."""

import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from medsilo.errors import MedsiloError, Unreachable
from medsilo.federation.record import Record
from medsilo.files import is_safe_name, write_json
from medsilo.flare.jobs import check_components, pack, plan_of

CONNECT = 10.0  # seconds NVFlare has to reach the server
POLL = 1.0  # seconds between looks at a running job
PATIENCE = 600.0  # seconds that watching goes on without a connection
STATISTICS = "medsilo"  # the group in NVFlare's job statistics where the controller tells its rounds
Say = Callable[[str], None]


@contextmanager
def connected(kit: Path) -> Iterator[Session]:
    """A session with the server as the kit's owner; whatever NVFlare raises becomes an error of one line."""
    try:
        admin = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]
    except (OSError, ValueError, KeyError) as error:
        raise MedsiloError(f"{kit} is no kit of a person: it has no startup/fed_admin.json that can be read") from error
    user, address = admin["username"], f"{admin['host']}:{admin['port']}"
    try:
        with redirect_stdout(io.StringIO()):  # it says that it connects
            session = new_secure_session(user, str(kit), timeout=CONNECT)
        try:
            yield session
        finally:
            session.close()
    except (MedsiloError, BrokenPipeError):
        raise
    except (api_spec.NoConnection, api_spec.SessionClosed) as error:
        raise Unreachable(f"the server at {address} does not answer; is it started, and the way to it open?") from error
    except api_spec.AuthorizationError as error:
        raise MedsiloError(f"{user} may not do this: {_line(error)}") from error
    except api_spec.AuthenticationError as error:
        raise MedsiloError(f"the server at {address} does not accept {user}: {_line(error)}") from error
    except api_spec.JobNotFound as error:
        raise MedsiloError(f"{_line(error)}; 'medsilo status --kit {kit}' lists jobs") from error
    except Exception as error:
        raise MedsiloError(f"NVFlare: {_line(error) or type(error).__name__}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def submit(job: Path, kit: Path, changes: Iterable[str] = (), with_code: bool = False) -> str:
    """Check a job against its plan and against who is there, submit it, and return NVFlare's id for it."""
    plan = plan_of(job, changes)
    if plan.algorithm.pooled:
        raise MedsiloError(f"{plan.algorithm.name} pools all data and never runs between hospitals")
    with tempfile.TemporaryDirectory() as folder:
        packed = pack(job, Path(folder) / plan.algorithm.name, changes, with_code)
        check_components(packed)
        if plan.participation.sites:  # nothing of the study reaches a hospital that the plan does not name
            meta = json.loads((packed / "meta.json").read_text())
            write_json(packed / "meta.json", {**meta, "deploy_map": {"app": ["server", *plan.participation.sites]}})
        with connected(kit) as session:
            here = {client.name for client in session.get_system_info().client_info}
            asked = set(plan.participation.sites) or here
            if len(asked & here) < plan.participation.required:
                wanted, there = (", ".join(sorted(names)) or "nobody" for names in (asked, here))
                raise MedsiloError(
                    f"not submitted: the plan needs {plan.participation.required} of {wanted}, and connected are "
                    f"{there}; start those who are missing, or change participation"
                )
            return session.submit_job(str(packed))


def abort(job_id: str, kit: Path) -> str:
    """End a job; returns what the server said."""
    with connected(kit) as session:
        return session.abort_job(job_id) or "aborted"


def status(kit: Path, job_id: str | None = None) -> list[str]:
    """Who is there and what runs, or one job, as lines."""
    with connected(kit) as session:
        if job_id:
            job = session.get_job_meta(job_id)
            return [_job_line(job), *_obstacles(job)]
        info = session.get_system_info()
        names = sorted(client.name for client in info.client_info)
        jobs = [_job_line(job) for job in session.list_jobs(reverse=True, limit=20)]
        since = datetime.fromtimestamp(info.server_info.start_time, UTC)
        return [f"server: up since {since:%Y-%m-%d %H:%M:%S} UTC", f"connected: {', '.join(names) or 'nobody'}", *jobs]


def _job_line(job: dict[str, Any]) -> str:
    keys = ("job_id", "status", "job_name" if "job_name" in job else "name", "submitter_name", "submit_time")
    return "  ".join(str(job[key]) for key in keys if job.get(key))


def _obstacles(job: dict[str, Any]) -> list[str]:
    """Why a job waits or could not start, as NVFlare's scheduler and the hospitals said."""
    if job["status"] == "SUBMITTED":
        return [said.partition(": ")[2] for said in job.get("schedule_history", [])[-1:]]  # without the time
    return [said for said in job.get("job_deploy_detail", []) if not said.endswith(": OK")]


def watch(job_id: str, kit: Path, on_round: Callable[[dict[str, Any], dict[str, Any]], None], say: Say) -> str:
    """Report rounds, from the server's own records, until the job ends; returns its final status.

    A lost connection is made anew; rounds that ended meanwhile are reported then.
    """
    study: dict[str, Any] = {}
    seen, said, heard = 0, set[str](), time.monotonic()
    while True:
        try:
            with connected(kit) as session:
                while True:
                    job = session.get_job_meta(job_id)
                    status = job["status"]
                    for line in _obstacles(job):
                        if line not in said:
                            say(line)
                            said.add(line)
                    if status == "RUNNING":
                        study = _so_far(session, job_id) or study
                    elif _is_over(status) and seen != study.get("planned"):  # the last rounds were too quick to be told
                        study = _ended(session, job_id)
                    for record in study.get("rounds", [])[seen:]:
                        on_round(record, study)
                        seen += 1
                    if _is_over(status):
                        return status
                    heard = time.monotonic()
                    time.sleep(POLL)
        except Unreachable as error:
            if time.monotonic() - heard > PATIENCE:
                raise
            say(f"{error} Trying again")
            time.sleep(POLL)


def _is_over(status: str) -> bool:
    return status.startswith("FINISHED")


def _so_far(session: Session, job_id: str) -> dict[str, Any]:
    """What the controller tells while it runs; nothing when the job is starting or just ends."""
    try:
        told = session.show_stats(job_id, api_spec.TargetType.SERVER)
    except (api_spec.JobNotFound, api_spec.JobNotRunning, api_spec.InternalError):
        return {}
    return told.get("server", {}).get(STATISTICS, {})


def _ended(session: Session, job_id: str) -> dict[str, Any]:
    """The same from what a job left; nothing for those who may look on but not download."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = _download(session, job_id, Path(folder))
        except api_spec.AuthorizationError:
            return {}
        summary = Record(run).summary() if run else {}
        if not run or not summary:
            return {}
        planned, metric = summary["rounds"]["planned"], summary["metric"]
        return {"planned": planned, "metric": metric, "rounds": Record(run).rounds()}


def _download(session: Session, job_id: str, folder: Path) -> Path | None:
    """Download what a job left; the run's folder in it, if there is one."""
    workspace = Path(session.download_job_result(job_id, str(folder))) / "workspace"
    runs = [path for path in workspace.glob("medsilo/*") if path.is_dir() and is_safe_name(path.name)]
    return runs[0] if len(runs) == 1 else None


def fetch(job_id: str, kit: Path, out: Path) -> Path:
    """Download a finished job's results into a run folder under `out`; returns it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fetching-") as folder, connected(kit) as session:
        status = str(session.get_job_status(job_id))
        if not _is_over(status):
            raise MedsiloError(f"job {job_id} is {status}; 'medsilo watch' waits for its end")
        run = _download(session, job_id, Path(folder))
        if run is None or not (run / "summary.json").exists():
            raise MedsiloError(
                f"job {job_id} ({status}) left no results: it ended before its study did; "
                "'nvflare job logs' shows the server's log to a project_admin"
            )
        if (out / run.name).exists():
            raise MedsiloError(f"{out / run.name} exists; remove it or choose another --out")
        return Path(shutil.move(run, out / run.name))
