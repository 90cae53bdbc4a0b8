"""A method as an NVFlare job: one canonical form, written, checked and packed here."""

import importlib
import json
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json, write_text
from medsilo.flare.job_source import SHIPPED, shipped, shipped_jobs, values_of
from medsilo.flare.timeouts import timeouts_of
from medsilo.plan import Plan, parse_plan, read_plan
from medsilo.registry import ANY
from medsilo.runs import paths
from medsilo.site.policy import CONTROLLER, EXECUTOR
from nvflare_reliability.timeouts import Timeouts, limits

META = "meta.json"
CONFIG = Path("app/config")
SERVER, CLIENT = "config_fed_server.json", "config_fed_client.json"
PLAN = CONFIG / paths.PLAN
CUSTOM = Path("app/custom")
# A job without code has this file where code would be: NVFlare takes its classes for the job's own then, and asks a
# site's class_allow_list for none. What is submitted has it not, and a hospital's list holds.
NO_CODE = CUSTOM / "README.md"
JOBS = Path("jobs")  # where a job is looked for by its name alone


def canonical_job(plan: Plan) -> dict[Path, dict[str, Any]]:
    """The JSON files of a job for this plan."""
    # Nothing of the study reaches a hospital that the plan does not name.
    named = plan.participation.everyone
    name, required = plan.algorithm.name, plan.participation.required
    return job_files(name, required, named, CONTROLLER, EXECUTOR, timeouts_of(plan))


def job_files(
    name: str, required: int, named: Sequence[str], controller: str, executor: str, patience: Timeouts
) -> dict[Path, Any]:
    """Return the JSON files of a job. named: the hospitals that it goes to; by default all that are connected."""
    common: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    workflow = {"id": "medsilo", "path": controller, "args": {}}
    # Sites look for work this often (seconds); NVFlare's default of 2 would be the least a round takes.
    server = {**limits(patience, "server"), "server": {"task_request_interval": 0.1}, "workflows": [workflow]}
    client = {**limits(patience, "site"), "executors": [{"tasks": ["*"], "executor": {"path": executor, "args": {}}}]}
    return {
        Path(META): {
            "name": name,
            "min_clients": required,
            "resource_spec": {},
            "deploy_map": {"app": ["server", *named] if named else ["@ALL"]},
        },
        CONFIG / SERVER: {**common, **server},
        CONFIG / CLIENT: {**common, **client},
    }


def find_job(job: str | Path) -> Path:
    """Return the folder of a job, given as such or as the name of a job in ./jobs, or else the plan of one that comes
    with medsilo; an error says what is near."""
    folder = Path(job)
    if (folder / PLAN).is_file() or folder.is_relative_to(SHIPPED):
        return folder
    inside = next((above for above in folder.parents if (above / PLAN).is_file()), None)
    if inside:
        raise MedsiloError(f"{folder} lies in a job; give the job's folder, {inside}, and another plan with --plan")
    if folder.is_file():
        raise MedsiloError(f"{folder} is a file; give the job's folder, and a plan with --plan")
    if (folder / paths.PLAN).is_file() and (folder / paths.ROUNDS).is_file():
        raise MedsiloError(f"{folder} is a run, not a job; to train it further: medsilo run {folder} --more 20")
    if folder.parent == Path() and (JOBS / folder / PLAN).is_file():
        return JOBS / folder
    if not folder.exists() and (own := shipped(folder)):
        return own
    if folder.name == "central":
        raise MedsiloError(
            "central pools all data, so it is no job: medsilo run local --set algorithm.name=central --engine "
            "inprocess, or beside others: medsilo compare --methods central,fedavg"
        )
    there = {path.parents[2].name: path.parents[2] for path in folder.parent.glob(f"*/{PLAN.as_posix()}")}
    known = there or {name: Path(name) for name in shipped_jobs()}
    near = get_close_matches(folder.name, known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"jobs: {', '.join(sorted(known))}"
    if folder.is_dir() and not near:
        names = sorted(path.parents[2].name for path in folder.glob(f"*/{PLAN.as_posix()}"))
        hint = f"to make a job for a folder of data: medsilo init {folder}; for a method's: medsilo list"
        hint = f"jobs in it: {', '.join(names)}" if names else hint
    raise MedsiloError(f"no job at {folder}: it needs {PLAN}; {hint}")


def plan_of(
    job: Path | str,
    changes: Iterable[str] = (),
    plan: Path | None = None,
    allowed: Collection[str] = ANY,
    here: bool = False,
) -> Plan:
    """Return the plan of a job or of a plan's file, or another in its place, with `a.b=value` changes.

    The method is the job's, whatever method the other plan is of. `allowed` and `here`: as in `parse_plan`.
    """
    is_file = Path(job).suffix in (".yaml", ".yml") or Path(job).is_file()
    own = Path(job) if is_file else find_job(job)
    if plan is None:
        return parse_plan(_values(own), changes, allowed, here)
    method = parse_plan(_values(own), allowed=allowed).algorithm
    chosen = parse_plan(read_plan(plan, method), changes, allowed, here)
    if chosen.algorithm.name != method.name:
        raise MedsiloError(
            f"--set algorithm.name={chosen.algorithm.name}: the job's method is {method.name}; leave it out, or give "
            "that method's job"
        )
    return chosen


def _values(job: Path) -> Any:
    """Return the plan of a job's folder, of a plan's file, or of a job that comes with medsilo, as it was written."""
    if job.is_relative_to(SHIPPED):
        return values_of(job)
    return read_plan(job / PLAN if (job / PLAN).is_file() else job)


def has_code(job: Path) -> bool:
    """Return whether a job brings code of its own."""
    return any(path.is_file() and path != job / NO_CODE for path in (job / CUSTOM).rglob("*"))


def scope_of(job: Path | str) -> str | None:
    """Return the privacy scope that a job's meta.json asks for."""
    found = find_job(job)
    return None if found.is_file() else _meta(found).get("scope")


def _meta(job: Path) -> dict[str, Any]:
    try:
        return json.loads((job / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MedsiloError(f"the job's {META} cannot be read ({type(error).__name__}); pack it again") from error


def write_job(destination: Path, plan: Plan, job: Path | None = None, **controller_args: Any) -> None:
    """Write a job for this plan. What `job` has beyond the canonical form stays: filters, components, code,
    resources and scope."""
    if destination.exists():
        raise MedsiloError(f"{destination} exists; choose another place or remove it")
    job = None if job and job.is_file() else job  # one that comes with medsilo has the canonical form
    for path, content in canonical_job(plan).items():
        if job and path.name == META:
            own = {key: content[key] for key in ("name", "min_clients", "deploy_map")}  # these the plan says
            content = {**content, **_meta(job), **own}
        elif job:
            own = limits(timeouts_of(plan), "server" if path.name == SERVER else "site")
            content = json.loads((job / path).read_text()) | own
        for workflow in content.get("workflows", []):
            if workflow.get("path") == CONTROLLER:
                workflow["args"] = {**workflow.get("args", {}), **controller_args}
        write_json(destination / path, content)
    write_text(destination / PLAN, plan.to_yaml())
    if job and has_code(job):
        shutil.copytree(job / CUSTOM, destination / CUSTOM, ignore=shutil.ignore_patterns("__pycache__"))


def check_components(job: Path) -> None:
    """Import every class that the job names: NVFlare's simulator hangs on a missing one."""
    if (job / CUSTOM).is_dir():
        sys.path.append(str(job / CUSTOM))
    for name in (SERVER, CLIENT):
        for path in _component_paths(json.loads((job / CONFIG / name).read_text())):
            module, _, attribute = path.rpartition(".")
            try:
                getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError) as error:
                raise MedsiloError(f"{name}: component {path} cannot be loaded: {error}") from error


def _component_paths(value: Any) -> list[str]:
    if isinstance(value, list):
        return [path for item in value for path in _component_paths(item)]
    if not isinstance(value, dict):
        return []
    own = [value["path"]] if isinstance(value.get("path"), str) else []
    return own + [path for item in value.values() for path in _component_paths(item)]
