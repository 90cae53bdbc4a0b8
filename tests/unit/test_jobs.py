"""Jobs: one canonical form, packing with and without code."""

import json
from pathlib import Path

import pytest

from medsilo.algorithms import ALGORITHMS
from medsilo.errors import MedsiloError
from medsilo.flare.jobs import CONFIG, CUSTOM, canonical_job, check_components, find_job, pack, plan_of
from medsilo.package import ROOT, package_facts, package_files
from medsilo.plan import load_plan

JOBS = Path(__file__).resolve().parents[2] / "jobs"
FEDERATED = sorted(name for name, method in ALGORITHMS.items() if not method.pooled)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_federated_method_has_a_job_and_every_job_a_method() -> None:
    assert sorted(path.name for path in JOBS.iterdir()) == FEDERATED


@pytest.mark.parametrize("method", FEDERATED)
def test_jobs_have_the_canonical_form(method: str) -> None:
    job = JOBS / method
    plan = plan_of(job)
    assert plan.algorithm.name == method
    written = {Path(path): content for path, content in files(job).items() if not path.startswith("plans/")}
    expected = {path: (json.dumps(content, indent=2) + "\n").encode() for path, content in canonical_job(plan).items()}
    assert written.keys() == {*expected, CONFIG / "plan.yaml"}
    assert {path: written[path] for path in expected} == expected


@pytest.mark.parametrize("method", FEDERATED)
def test_jobs_differ_in_their_method_only(method: str) -> None:
    reference = plan_of(JOBS / "fedavg").resolved()
    own = plan_of(JOBS / method).resolved()
    assert {key for key in reference if reference[key] != own[key]} <= {"algorithm"}


@pytest.mark.parametrize(
    "path", sorted(JOBS.glob("*/plans/*.yaml")), ids=lambda path: f"{path.parents[1].name}-{path.stem}"
)
def test_a_job_s_further_plans_load_and_are_of_its_method(path: Path) -> None:
    assert load_plan(path).algorithm.name == path.parents[1].name


def test_packing_is_deterministic_and_carries_the_package_with_its_hash(tmp_path: Path) -> None:
    one = pack(JOBS / "fedbn", tmp_path / "one", with_code=True)
    two = pack(JOBS / "fedbn", tmp_path / "two", with_code=True)
    assert files(one) == files(two)
    assert not any(path.is_symlink() for path in one.rglob("*"))
    inside = one / CUSTOM / "medsilo"
    assert {path.relative_to(inside) for path in inside.rglob("*") if path.is_file()} == set(package_files())
    assert all((inside / path).read_bytes() == (ROOT / path).read_bytes() for path in package_files())
    assert json.loads((one / "meta.json").read_text())["custom_props"] == {"medsilo": package_facts()}


def test_packing_resolves_the_plan_and_its_minimum(tmp_path: Path) -> None:
    changes = ["participation.minimum=2", "participation.when_missing=continue", "training.rounds=3"]
    job = pack(JOBS / "fedavg", tmp_path / "job", changes)
    plan = load_plan(job / CONFIG / "plan.yaml")
    assert plan.hash == plan_of(JOBS / "fedavg", changes).hash
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 2
    assert not (job / CUSTOM).exists()
    with pytest.raises(MedsiloError, match="exists; choose another place"):
        pack(JOBS / "fedavg", tmp_path / "job")


def test_an_unknown_job_lists_those_that_are_there() -> None:
    with pytest.raises(MedsiloError) as error:
        find_job(JOBS / "fedavgg")
    assert "fedavgg" in str(error.value) and ", ".join(FEDERATED) in str(error.value)


def test_a_component_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    job = pack(JOBS / "fedavg", tmp_path / "job")
    path = job / CONFIG / "config_fed_server.json"
    path.write_text(path.read_text().replace("MedsiloController", "MedsiloControler"))
    with pytest.raises(MedsiloError, match=r"config_fed_server.json: component .*MedsiloControler cannot be loaded"):
        check_components(job)
