"""When `make test-long` last passed in the workflow `long`, and how its last run ended: `make last-long`, in CI.

It asks GitHub for the runs of this repository, and adds a line to the summary of the run that asks. It fails nothing:
a change does not wait for tests that run at night.
"""

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import Request, urlopen

from pydantic import AwareDatetime, BaseModel, Field, ValidationError

ADDRESS = "https://api.github.com/repos/{}/actions/workflows/long.yml/runs?branch=main&status={}&per_page=1"
LARGEST, SECONDS, OLD = 10_000_000, 30, timedelta(days=3)


class RunOfLong(BaseModel):
    """A run of the workflow, as GitHub tells it."""

    created_at: AwareDatetime
    head_sha: str = Field(pattern=r"^[0-9a-f]{40}$")
    conclusion: str | None = Field(default=None, max_length=40)


class _Answer(BaseModel):
    workflow_runs: list[RunOfLong] = Field(max_length=100)


Ask = Callable[[str], bytes]


def ask_github(address: str) -> bytes:
    """Return GitHub's answer; GITHUB_TOKEN is sent where there is one."""
    token = os.environ.get("GITHUB_TOKEN")
    with urlopen(
        Request(address, headers={"Authorization": f"Bearer {token}"} if token else {}), timeout=SECONDS
    ) as it:
        return it.read(LARGEST)


def last(repository: str, status: str, ask: Ask) -> RunOfLong | None:
    """Return the newest run with this status; none where there is none."""
    found = _Answer.model_validate_json(ask(ADDRESS.format(repository, status)))
    return found.workflow_runs[0] if found.workflow_runs else None


def told(repository: str, ask: Ask, now: datetime) -> str:
    """Return what is known, in one line."""
    try:
        passed, ended = (last(repository, status, ask) for status in ("success", "completed"))
    except (OSError, ValidationError) as error:
        return f"make test-long: GitHub could not be asked ({type(error).__name__}); see its workflow 'long'"
    if not passed:
        return "make test-long has never passed on main: start its workflow 'long'"
    line = f"make test-long last passed on {passed.created_at:%Y-%m-%d %H:%M} UTC, commit {passed.head_sha[:12]}"
    if now - passed.created_at > OLD:
        line += f", {(now - passed.created_at).days} days ago"
    if ended and ended.created_at > passed.created_at:
        line += f"; its run of {ended.created_at:%Y-%m-%d} ended with {ended.conclusion!r}: see its workflow 'long'"
    return line


def main() -> int:
    """Print the line, and add it to the summary of this run."""
    if not (repository := os.environ.get("GITHUB_REPOSITORY")):
        print("GITHUB_REPOSITORY=owner/name is missing: this is for CI", file=sys.stderr)
        return 1
    line = told(repository, ask_github, datetime.now(UTC))
    print(line)
    if place := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
