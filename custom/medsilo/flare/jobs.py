"""Read NVFlare jobs that contain a plan. The module medsilo_lab.jobs writes jobs that contain a plan."""

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded
from medsilo.core.text import is_safe_name
from medsilo.flare.job_source import YAML, find_job, values_of
from medsilo.plan import Plan, parse_plan, read_plan
from medsilo.registry import ANY
from medsilo.runs import paths
from medsilo.site.job_code import JobCode

META = "meta.json"
SERVER, CLIENT = "config_fed_server.json", "config_fed_client.json"
CUSTOM = Path("app/custom")
# A job without code contains this file instead of code. Because the job contains this file, NVFlare accepts the job's
# classes, although the hospital's class_allow_list is empty. If a job contains code, it lacks this file, so that
# NVFlare checks the job's classes against a hospital's class_allow_list.
NO_CODE = CUSTOM / "README.md"
LARGEST_JSON = 1 << 20  # maximum bytes of each file in a job's configuration


def plan_of(
    job: Path | str,
    changes: Iterable[str] = (),
    plan: Path | None = None,
    allowed: Collection[str] = ANY,
    local: bool = False,
) -> Plan:
    """Return the plan of a job.

    Args:
        job: A job as in `find_job`, or a file that contains a plan.
        changes: Changes to the plan, of the form `key.subkey=value`.
        plan: A file whose plan replaces the job's plan. Only the job's method is kept.
    """
    is_file = Path(job).suffix in YAML or Path(job).is_file()
    own = Path(job) if is_file else find_job(job)
    if plan is None:
        return parse_plan(values_of(own, read_plan), changes, allowed, local)
    method = parse_plan(values_of(own, read_plan), allowed=allowed).algorithm
    chosen = parse_plan(read_plan(plan, method), changes, allowed, local)
    if chosen.algorithm.name != method.name:
        raise MedsiloError(
            f"--set algorithm.name={chosen.algorithm.name}: the job's method is {method.name}; leave it out, or give "
            "that method's job"
        )
    return chosen


def has_code(job: Path) -> bool:
    return any(path.is_file() and path != job / NO_CODE for path in (job / CUSTOM).rglob("*"))


def code_of(job: Path, plan: Plan, app: Path | None = None) -> JobCode | None:
    """Return the code in a job; None if the job contains no code. Raises MedsiloError if the code is invalid.

    Args:
        app: The folder of a site's app; by default the app that all sites share.
    """
    if app is None and (not job.is_dir() or not has_code(job)):
        return None
    return JobCode.read(app or job / "app", plan.network.files)


def app_at(job: str | Path, site: str = "") -> Path | None:
    """Return the folder of a site's app, or None if all sites of the job share one app.

    Args:
        site: The site's name; by default the first site.
    """
    folder = Path(job)
    if not (folder / META).is_file() or os.path.lexists(folder / "app"):
        return None
    apps = json_of(folder, META).get("deploy_map")
    for name, names in sorted(apps.items()) if isinstance(apps, dict) else ():
        here = isinstance(names, list) and (site in names if site else names != ["server"])
        if here and is_safe_name(name) and (folder / name / "config" / paths.PLAN).is_file():
            return folder / name
    return None


def scope_of(job: Path | str) -> str | None:
    """Return the privacy scope that a job's meta.json names, or None if the file names no scope."""
    found = find_job(job)
    scope = None if found.is_file() else json_of(found, META).get("scope")
    if scope is not None and not isinstance(scope, str):
        raise MedsiloError(f"the job's {META}: its scope must be a text; correct it")
    return scope


def json_of(job: Path, name: Path | str) -> dict[str, Any]:
    """Return the mapping in a JSON file of a job. Raises MedsiloError if the JSON file is damaged or does not contain a
    mapping.
    """
    try:
        found = json.loads(read_bounded(job / name, LARGEST_JSON))
        if not isinstance(found, dict):
            raise ValueError("no mapping")
        return found
    except (OSError, ValueError, RecursionError) as error:
        told = f"the job's {Path(name).name} cannot be read ({type(error).__name__}); pack it again"
        raise MedsiloError(told, str(error)) from error
