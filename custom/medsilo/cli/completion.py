"""Completion in the shell of jobs, methods and keys of the plan. Nothing heavy is imported."""

from collections.abc import Iterable


def jobs(incomplete: str) -> list[str]:
    """Return the jobs of this folder and those that come with medsilo; a shell adds files by itself."""
    from medsilo.flare.job_source import JOBS, PLAN, shipped_jobs

    here = {path.parents[2].name for path in JOBS.glob(f"*/{PLAN}")}
    found = {*here, *shipped_jobs()}
    return _beginning(found, incomplete)


def methods(incomplete: str) -> list[str]:
    """The methods that may come last in a list with commas."""
    from medsilo.registry import METHODS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(METHODS, last)]


def changes(incomplete: str) -> list[str]:
    """Return the keys of a plan, each up to its value."""
    from medsilo.cli.plan_keys import keys_of_plans

    known = keys_of_plans()
    keys = (f"{section}.{key}" if key else section for section, within in known.items() for key in (within or [""]))
    return _beginning((f"{key}=" for key in keys), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
