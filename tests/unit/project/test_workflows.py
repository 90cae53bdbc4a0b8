"""The public workflows call only targets of the Makefile, and name each action by its hash."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sources import makefile
from tests.unit.project import test_wheel

ACTION = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
RELEASE = "workflows/release.yml"
FILES = ("workflows/ci.yml", "workflows/nightly.yml", "workflows/long.yml", RELEASE, "actions/python/action.yml")


def steps_in(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, list):
        return [step for inner in part for step in steps_in(inner)]
    if not isinstance(part, dict):
        return []
    own = [step for step in part.get("steps", []) if isinstance(step, dict)]
    return [*own, *(step for name, inner in part.items() if name != "steps" for step in steps_in(inner))]


@pytest.mark.parametrize("name", FILES)
def test_a_workflow_calls_targets_of_the_makefile_and_pinned_actions(name: str, root: Path) -> None:
    read = yaml.safe_load((root / ".github" / name).read_text("utf-8"))
    targets = set(re.findall(r"(?m)^([a-z-]+):", makefile(root)))
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


def test_a_workflow_is_tested_here(root: Path) -> None:
    assert {f"workflows/{path.name}" for path in (root / ".github/workflows").iterdir()} == {*FILES[:-1]}


def test_a_release_s_files_are_attested_and_its_site_is_published(root: Path) -> None:
    """Only jobs for release tags may write, and only attestations and the website."""
    read = yaml.safe_load((root / ".github" / RELEASE).read_text("utf-8"))
    assert read[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key "on" as true
    files, site = read["jobs"]["files"], read["jobs"]["site"]
    assert files["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    assert site["permissions"] == {"contents": "read", "id-token": "write", "pages": "write"}
    made, attested, kept = (where(files, word) for word in ("make ", "attest-build-provenance", "upload-artifact"))
    assert max(made) < min(attested) < min(kept) and [files["steps"][at]["run"] for at in made] == [
        "make wheel",
        "make sbom",
    ]
    [proved], [uploaded] = ([files["steps"][at]["with"] for at in steps] for steps in (attested, kept))
    assert proved["subject-path"].split() == uploaded["path"].split() == ["dist/*.whl", "dist/sbom.cdx.json"]
    assert max(where(site, "make docs")) < min(where(site, "upload-pages-artifact")) < min(where(site, "deploy-pages"))
    others = [job for one in jobs_of(root, *FILES[:-1]) for job in one.values() if job not in (files, site)]
    assert others and all("write" not in job.get("permissions", {}).values() for job in others)


def where(job: Any, word: str) -> list[int]:
    """Return the places of the steps that run a command or an action."""
    return [at for at, step in enumerate(job["steps"]) if word in step.get("run", "") or word in step.get("uses", "")]


def test_the_long_tests_have_each_python_that_wheels_are_installed_with(root: Path) -> None:
    [step] = [one for one in steps_in(jobs_of(root, FILES[2])) if "./.github/actions/python" in one.values()]
    given = step["with"]["version"].split()
    assert given == sorted(
        given, key=lambda one: int(one.partition(".")[2]), reverse=True
    )  # by default, setup-python uses the last of several versions
    [matrix] = [
        mark for mark in test_wheel.test_it_runs_in_a_user_s_own_environment.pytestmark if mark.name == "parametrize"
    ]
    assert {python for python, *_ in matrix.args[1]} == set(given)


SYSTEMS = {  # for each system: the system's name on pages, and the runner
    "Linux on x86_64": "ubuntu-24.04",
    "Linux on aarch64": "ubuntu-24.04-arm",
    "macOS on Apple silicon": "macos-15",
}


def claimed(root: Path, row: str) -> tuple[set[str], set[str]]:
    page = (root / "docs/start/install.md").read_text("utf-8")
    [cell] = re.findall(rf"(?m)^\| {row} \| (.*) \|$", page)
    tested = cell.partition("Python 3.10")[0]
    return {SYSTEMS[name] for name in SYSTEMS if name in cell}, set(re.findall(r"\b3\.\d+\b", tested))


def test_each_claim_of_a_system_is_one_job(root: Path) -> None:
    job = yaml.safe_load((root / ".github/workflows/nightly.yml").read_text("utf-8"))["jobs"]["supported"]
    assert job["runs-on"] == "ubuntu-24.04" and [*job["strategy"]["matrix"]] == ["python"]
    assert "make supported" in [step.get("run") for step in steps_in(job)]
    tested = job["strategy"]["matrix"]["python"]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    own = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert {*tested} == {*own} and len(tested) == len(own) > 1
    assert claimed(root, "system") == ({job["runs-on"]}, {*tested})
    assert [one for one in project["classifiers"] if one.startswith("Operating")] == [
        "Operating System :: POSIX :: Linux"
    ]
    cases = {python for python, *_ in test_wheel.test_it_runs_in_a_user_s_own_environment.pytestmark[0].args[1]}
    assert cases == {*tested}


def test_each_other_system_that_a_page_names_is_one_job(root: Path) -> None:
    """The README names only Linux on x86_64, because jobs on other systems have not yet passed."""
    job = yaml.safe_load((root / ".github/workflows/nightly.yml").read_text("utf-8"))["jobs"]["elsewhere"]
    matrix = job["strategy"]["matrix"]
    assert job["runs-on"] == "${{ matrix.system }}" and matrix.keys() == {"system", "python"}
    assert claimed(root, "other systems") == ({*matrix["system"]}, {*matrix["python"]})
    assert "make trains PYTHON=python" in [step.get("run") for step in steps_in(job)]
    [where] = re.findall(r"systems other than (.*?)\.", (root / "README.md").read_text("utf-8"))
    assert where in SYSTEMS
    runners = {name for one in jobs_of(root, *FILES[:3]) for name in runners_of(one.values())}
    assert runners == {*SYSTEMS.values()}


def runners_of(jobs: Iterable[Any]) -> Iterator[str]:
    for job in jobs:
        yield from job["strategy"]["matrix"]["system"] if "matrix.system" in job["runs-on"] else [job["runs-on"]]


def jobs_of(root: Path, *names: str) -> list[Any]:
    return [yaml.safe_load((root / ".github" / name).read_text("utf-8"))["jobs"] for name in names]


def test_the_gate_s_targets_run_in_the_workflows(root: Path) -> None:
    gate = set(re.findall(r"(?m)^make ([a-z-]+)", (root / ".ci/run").read_text("utf-8")))
    assert gate and gate <= {step["run"].split()[1] for step in steps_in(jobs_of(root, *FILES[:2])) if "run" in step}


def test_what_no_change_waits_for_runs_at_night_and_before_a_release(root: Path) -> None:
    workflow = yaml.safe_load((root / ".github/workflows/long.yml").read_text("utf-8"))
    assert {"schedule", "push", "workflow_dispatch"} <= workflow[True].keys()  # YAML reads the key "on" as true
    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert "make test-long" in [step.get("run") for step in steps_in(jobs_of(root, FILES[2]))]
