"""Find the folder of a job. The jobs that medsilo includes are in the folder `jobs` of a checkout, or in the wheel of
medsilo-lab.
"""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import check_tree
from medsilo.core.package import PLACE, ROOT
from medsilo.runs import paths

CONFIG = Path("app/config")
PLAN = CONFIG / paths.PLAN
JOBS = Path("jobs")  # folder in which medsilo finds a job by its name
YAML = (".yaml", ".yml")  # suffixes of a file that contains a plan
LARGEST_FILE = 1 << 28  # maximum bytes of each file in a job
SHIPPED = ROOT / "jobs" if (ROOT / "jobs").is_dir() else PLACE.parent / "jobs"


def shipped_jobs() -> list[str]:
    return sorted(path.parents[2].name for path in SHIPPED.glob(f"*/{PLAN}"))


def shipped(job: Path) -> Path | None:
    """Return the folder of the included job with the given name, or None if no included job has this name.

    Args:
        job: The name, such as `fedavg` or `jobs/fedavg`.
    """
    name = "/".join(job.parts[1:] if job.parts[:1] == ("jobs",) else job.parts)
    return SHIPPED / name if name in shipped_jobs() else None


def values_of(job: Path, read: Callable[[Path], Any]) -> Any:
    """Return the values of a plan; the function does not validate the values.

    Args:
        job: The folder of a job, or a file that contains a plan.
    """
    return read(job / PLAN if (job / PLAN).is_file() else job)


def find_job(job: str | Path) -> Path:
    """Return the folder of a job. Raises MedsiloError if no job has this name; the message suggests similar names.

    Args:
        job: The job's path, its name in the folder ./jobs, or the name of an included job.
    """
    folder = _named(job)
    check_tree(folder, LARGEST_FILE, "the job")
    return folder


def _named(job: str | Path) -> Path:
    folder = Path(job)
    if os.path.lexists(folder / PLAN):
        return folder
    inside = next((above for above in folder.parents if (above / PLAN).is_file()), None)
    if inside:
        raise MedsiloError(f"{folder} lies in a job; give the job's folder, {inside}, and another plan with --plan")
    if folder.is_file() and folder.suffix == ".py":
        raise MedsiloError(
            f"{folder} is a script and no job; for your own script, with medsilo-lab: medsilo docs research/own-script"
        )
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
            "the method central pools all data, so it can't be a job: medsilo run local "
            "--set algorithm.name=central --engine inprocess, or: "
            "medsilo compare --methods central,fedavg"
        )
    there = {path.parents[2].name: path.parents[2] for path in folder.parent.glob(f"*/{PLAN.as_posix()}")}
    known = there or {name: Path(name) for name in shipped_jobs()}
    near = get_close_matches(folder.name, known, 1)
    listed = f"jobs: {', '.join(sorted(known))}" if known else "the jobs of methods come with medsilo-lab"
    hint = f"did you mean {known[near[0]]}?" if near else listed
    if folder.is_dir():
        names = sorted(path.parents[2].name for path in folder.glob(f"*/{PLAN.as_posix()}"))
        if not names:
            raise MedsiloError(f"{folder} is a folder, and no job; if it holds data, make a job: medsilo init {folder}")
        hint = f"jobs in it: {', '.join(names)}"
    raise MedsiloError(f"no job at {folder}: it needs {PLAN}; {hint}")


def job_or_run(job: str | Path) -> Path:
    """Return the folder of a job.

    Args:
        job: A job as in `find_job`, or the folder of a run. For a run, the function returns the folder of the run's
            job, or the run's plan file if the run was made without a job.
    """
    run = Path(job)
    if not (run / paths.ROUNDS).is_file() or not (run / paths.PLAN).is_file():
        return find_job(job)
    return run / paths.JOB if (run / paths.JOB / PLAN).is_file() else run / paths.PLAN
