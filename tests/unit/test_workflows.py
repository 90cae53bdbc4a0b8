"""The public workflows: they call the Makefile's targets and nothing else, and each action is fixed by its hash."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit import test_wheel

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


def test_the_long_tests_have_each_python_that_wheels_are_installed_with(root: Path) -> None:
    [step] = [one for one in steps_in(jobs_of(root, FILES[2])) if "./.github/actions/python" in one.values()]
    given = step["with"]["version"].split()
    assert given == sorted(
        given, key=lambda one: int(one.partition(".")[2]), reverse=True
    )  # setup-python's default is last
    [matrix] = [
        mark for mark in test_wheel.test_it_runs_in_a_user_s_own_environment.pytestmark if mark.name == "parametrize"
    ]
    assert {python for python, *_ in matrix.args[1]} == set(given)


def jobs_of(root: Path, *names: str) -> list[Any]:
    return [yaml.safe_load((root / ".github" / name).read_text("utf-8"))["jobs"] for name in names]


def test_the_gate_s_targets_run_in_the_workflows(root: Path) -> None:
    gate = set(re.findall(r"(?m)^make ([a-z-]+)", (root / ".ci/run").read_text("utf-8")))
    assert gate and gate <= {step["run"].split()[1] for step in steps_in(jobs_of(root, *FILES[:2])) if "run" in step}


def test_what_no_change_waits_for_runs_at_night_and_before_a_release(root: Path) -> None:
    workflow = yaml.safe_load((root / ".github/workflows/long.yml").read_text("utf-8"))
    assert {"schedule", "push", "workflow_dispatch"} <= workflow[True].keys()  # "on" is true in YAML
    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert "make test-long" in [step.get("run") for step in steps_in(jobs_of(root, FILES[2]))]
