"""The public workflows: they call the Makefile's targets and nothing else, and each action is fixed by its hash."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.last_long import ADDRESS, told

ACTION = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
FILES = ("workflows/ci.yml", "workflows/nightly.yml", "workflows/long.yml", "actions/python/action.yml")


def steps_in(part: Any) -> list[dict[str, Any]]:
    """Return every step of a workflow or an action."""
    if isinstance(part, list):
        return [step for inner in part for step in steps_in(inner)]
    if not isinstance(part, dict):
        return []
    own = [step for step in part.get("steps", []) if isinstance(step, dict)]
    return [*own, *(step for name, inner in part.items() if name != "steps" for step in steps_in(inner))]


@pytest.mark.parametrize("name", FILES)
def test_a_workflow_calls_targets_of_the_makefile_and_pinned_actions(name: str, root: Path) -> None:
    read = yaml.safe_load((root / ".github" / name).read_text("utf-8"))
    targets = set(re.findall(r"(?m)^([a-z-]+):", (root / "Makefile").read_text("utf-8")))
    steps = steps_in(read)
    assert steps
    for step in steps:
        if "run" in step:
            command, target, *arguments = step["run"].split()
            assert command == "make" and target in targets, step
            assert all(re.fullmatch(r"[A-Z]+=[\w.]+", argument) for argument in arguments), step
        else:
            local = step["uses"].startswith("./.github/")
            assert ACTION.fullmatch(step["uses"]) or (local and (root / step["uses"] / "action.yml").is_file()), step
    if name.startswith("workflows"):
        assert read["permissions"] == {"contents": "read"}
        assert all(0 < job["timeout-minutes"] <= 350 for job in read["jobs"].values())


def jobs_of(root: Path, *names: str) -> list[Any]:
    return [yaml.safe_load((root / ".github" / name).read_text("utf-8"))["jobs"] for name in names]


def test_the_gate_s_targets_run_in_the_workflows(root: Path) -> None:
    gate = set(re.findall(r"(?m)^make ([a-z-]+)", (root / ".ci/run").read_text("utf-8")))
    assert gate and gate <= {step["run"].split()[1] for step in steps_in(jobs_of(root, *FILES[:2])) if "run" in step}


def test_what_no_change_waits_for_runs_at_night_and_before_a_release(root: Path) -> None:
    """And each change is told when it last passed."""
    workflow = yaml.safe_load((root / ".github/workflows/long.yml").read_text("utf-8"))
    assert {"schedule", "push", "workflow_dispatch"} <= workflow[True].keys()  # "on" is true in YAML
    assert workflow[True]["push"] == {"tags": ["v*"]}
    for file, target in ((FILES[2], "test-long"), (FILES[0], "last-long")):
        assert f"make {target}" in [step.get("run") for step in steps_in(jobs_of(root, file))]
    assert "/actions/workflows/long.yml/" in ADDRESS


GONE = b'{"workflow_runs": []}'


def answers(success: bytes, completed: bytes) -> Callable[[str], bytes]:
    return lambda address: success if "status=success" in address else completed


def run_of(day: int, conclusion: str = "success") -> bytes:
    one = {"created_at": f"2026-11-{day}T01:47:00Z", "head_sha": f"{day:040x}", "conclusion": conclusion}
    return json.dumps({"total_count": 9, "workflow_runs": [one]}).encode()


NOW = datetime(2026, 11, 27, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("success", "completed", "said", "not_said"),
    [
        (run_of(27), run_of(27), ["2026-11-27 01:47", f"{27:040x}"[:12]], ["days ago", "ended"]),
        (run_of(17), run_of(17), ["2026-11-17", "10 days ago"], ["ended"]),
        (run_of(26), run_of(27, "failure"), ["2026-11-26", "2026-11-27", "'failure'"], ["days ago"]),
        (GONE, run_of(27, "failure"), ["never passed"], ["2026"]),
        (
            b'{"workflow_runs": [{"created_at": "yesterday", "head_sha": "x"}]}',
            GONE,
            ["ValidationError"],
            ["yesterday"],
        ),
        (b"<html>", GONE, ["ValidationError"], ["<html>"]),
    ],
)
def test_it_is_told_when_the_long_tests_last_passed(
    success: bytes, completed: bytes, said: list[str], not_said: list[str]
) -> None:
    line = told("owner/name", answers(success, completed), NOW)
    assert "\n" not in line and all(part in line for part in said) and not any(part in line for part in not_said)
