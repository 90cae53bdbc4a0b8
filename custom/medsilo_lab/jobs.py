"""Write and check the NVFlare job of a plan in medsilo's standard form. The module medsilo.flare.jobs reads jobs in
medsilo's standard form.
"""

import importlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import write_json, write_text
from medsilo.flare.job_source import CONFIG, PLAN
from medsilo.flare.jobs import CLIENT, CUSTOM, META, SERVER, has_code, json_of
from medsilo.flare.timeouts import timeouts_of
from medsilo.plan import Plan
from medsilo.site.policy import EXECUTOR
from nvflare_reliability.timeouts import Timeouts, limits

CONTROLLER = "medsilo_server.flare.controller.MedsiloController"


def canonical_job(plan: Plan) -> dict[Path, dict[str, Any]]:
    # hospitals that the plan does not name receive no data of the study
    named = plan.participation.everyone
    name, required = plan.algorithm.name, plan.participation.required
    return job_files(name, required, named, CONTROLLER, EXECUTOR, timeouts_of(plan))


def job_files(
    name: str, required: int, named: Sequence[str], controller: str, executor: str, patience: Timeouts
) -> dict[Path, Any]:
    """Return the JSON files of a job. `named` are the participating hospitals; if `named` is empty, all connected
    hospitals participate.
    """
    common: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    workflow = {"id": "medsilo", "path": controller, "args": {}}
    # Sites request tasks at this interval in seconds. With NVFlare's default of 2 seconds, a round would take at least
    # 2 seconds.
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


def write_job(destination: Path, plan: Plan, job: Path | None = None, **controller_args: Any) -> None:
    """Write the NVFlare job of a plan.

    Filters, components, code, resources and scope of the given job `job` are copied into the new job.
    """
    if destination.exists():
        raise MedsiloError(f"{destination} exists; choose another path, or remove it")
    job = None if job and job.is_file() else job  # a job in the package medsilo has the standard form
    for path, content in canonical_job(plan).items():
        if job and path.name == META:
            # the job's name, number of clients and deployment come from the plan, and not from the given job
            own = {key: content[key] for key in ("name", "min_clients", "deploy_map")}
            content = {**content, **json_of(job, META), **own}
        elif job:
            own = limits(timeouts_of(plan), "server" if path.name == SERVER else "site")
            content = json_of(job, path) | own
        with reading(f"the job's {path.name}"):
            for workflow in content.get("workflows", []):
                if workflow.get("path") == CONTROLLER:
                    workflow["args"] = {**workflow.get("args", {}), **controller_args}
        write_json(destination / path, content)
    write_text(destination / PLAN, plan.to_yaml())
    for file in sorted((job / CONFIG).iterdir()) if job else ():
        if file.is_file() and not file.is_symlink() and not (destination / CONFIG / file.name).exists():
            shutil.copyfile(file, destination / CONFIG / file.name)
    if job and has_code(job):
        shutil.copytree(job / CUSTOM, destination / CUSTOM, ignore=shutil.ignore_patterns("__pycache__"))


def check_components(job: Path) -> None:
    """Import every class that a job names, except medsilo's controller and executor. NVFlare's simulator would hang if
    a class were missing.
    """
    if (job / CUSTOM).is_dir():
        sys.path.append(str(job / CUSTOM))
    for name in (SERVER, CLIENT):
        for path in classes_in(job, name) - {CONTROLLER, EXECUTOR}:
            module, _, attribute = path.rpartition(".")
            try:
                getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError) as error:
                raise MedsiloError(f"{name}: component {path} cannot be loaded: {error}") from error


def classes_in(job: Path, name: str) -> set[str]:
    """Return the classes that a configuration file of a job names."""
    return {*_component_paths(json.loads((job / CONFIG / name).read_text()))}


def _component_paths(value: Any) -> list[str]:
    if isinstance(value, list):
        return [path for item in value for path in _component_paths(item)]
    if not isinstance(value, dict):
        return []
    own = [value["path"]] if isinstance(value.get("path"), str) else []
    return own + [path for item in value.values() for path in _component_paths(item)]
