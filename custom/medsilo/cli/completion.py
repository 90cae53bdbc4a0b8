"""Shell completion for names of jobs and methods and for keys of a plan.

To keep completion fast, this module imports no large packages.
"""

from collections.abc import Iterable


def jobs(incomplete: str) -> list[str]:
    """Return the names of jobs in the current folder and of the jobs that the package medsilo contains."""
    from medsilo.flare.job_source import JOBS, PLAN, shipped_jobs

    here = {path.parents[2].name for path in JOBS.glob(f"*/{PLAN}")}
    found = {*here, *shipped_jobs()}
    return _beginning(found, incomplete)


def methods(incomplete: str) -> list[str]:
    """Return the possible completions of the last method in a list of methods separated by commas."""
    from medsilo.registry import METHODS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(METHODS, last)]


def changes(incomplete: str) -> list[str]:
    """Return the possible completions of a plan's key, each with an equals sign."""
    from medsilo.cli.plan_keys import keys_of_plans

    known = keys_of_plans()
    keys = (f"{section}.{key}" if key else section for section, within in known.items() for key in (within or [""]))
    return _beginning((f"{key}=" for key in keys), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
