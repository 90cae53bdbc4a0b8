"""Test that medsilo finds jobs, packs jobs with and without code, and rejects damaged jobs."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.yaml_text import load_yaml
from medsilo.flare.job_source import CONFIG, LARGEST_FILE, PLAN, SHIPPED, find_job
from medsilo.flare.jobs import CLIENT, CUSTOM, META, SERVER, plan_of, scope_of
from medsilo.plan import load_plan
from medsilo.recipes import FedAvgRecipe
from medsilo.registry import METHODS as TABLE
from medsilo_lab.jobs import check_components, write_job
from tests.conftest import METHODS, over_all
from tools import job_files
from tools.job_files import first_plan

JOBS = Path(__file__).resolve().parents[3] / "jobs"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_federated_method_has_a_job_and_every_job_a_method() -> None:
    assert sorted(path.parents[2].name for path in JOBS.glob("*/app/config/plan.yaml")) == sorted(METHODS)


def test_the_files_of_each_job_are_its_plans(tmp_path: Path) -> None:
    shutil.copytree(JOBS, tmp_path / "jobs")
    job_files.write(tmp_path / "jobs")
    changed = [path for path, content in files(tmp_path / "jobs").items() if files(JOBS).get(path) != content]
    assert not changed, "python -m tools.job_files"


@pytest.mark.parametrize("method", METHODS)
def test_a_new_job_has_the_plan_of_the_methods_job(method: str) -> None:
    new, known = (load_yaml(text) for text in (first_plan(TABLE[method]), (JOBS / method / PLAN).read_text("utf-8")))
    assert TABLE.read(new.pop("algorithm")) == TABLE.read(known.pop("algorithm"))
    assert new == known


def test_a_method_without_a_job_gets_one(tmp_path: Path) -> None:
    shutil.copytree(JOBS, tmp_path / "jobs")
    shutil.rmtree(tmp_path / "jobs/fedrep")
    (tmp_path / "jobs/fedper" / PLAN).write_text((JOBS / "fedper" / PLAN).read_text().replace("rounds: 8", "rounds: 5"))
    job_files.write(tmp_path / "jobs")
    assert plan_of(tmp_path / "jobs/fedrep").hash == plan_of(JOBS / "fedrep").hash
    assert files(tmp_path / "jobs/fedrep").keys() == files(JOBS / "fedrep").keys()
    assert plan_of(tmp_path / "jobs/fedper").rounds == 5, "the program overwrote a plan"


@pytest.mark.slow
def test_who_edits_the_plan_of_a_job_has_edited_the_job(tmp_path: Path) -> None:
    """In a checkout of the repository, a job's name and the path of the job's folder both select the plan that the user
    has edited.
    """
    checkout = tmp_path / "checkout"
    for name in ("custom", "jobs"):
        shutil.copytree(JOBS.parent / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    plan = checkout / "jobs/fedavg" / PLAN
    plan.write_text(plan.read_text().replace("rounds: 8", "rounds: 5"))
    environment = {**os.environ, "PYTHONPATH": str(checkout / "custom")}
    for job in ("fedavg", str(checkout / "jobs/fedavg")):
        command = [sys.executable, "-m", "medsilo", "disclosure", job]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert "1 to 5" in done.stdout, job


@pytest.mark.parametrize(
    ("changes", "addressed"),
    [
        ([], ["@ALL"]),
        (["participation.sites=[a, b]"], ["server", "a", "b"]),
        (["participation.sites=[a, b]", "participation.evaluation_sites=[z]"], ["server", "a", "b", "z"]),
    ],
)
def test_a_job_goes_to_the_hospitals_that_the_plan_names(
    changes: list[str], addressed: list[str], tmp_path: Path
) -> None:
    job = pack(JOBS / "fedavg", tmp_path / "job", changes)
    assert json.loads((job / "meta.json").read_text())["deploy_map"] == {"app": addressed}


@pytest.mark.slow
@over_all("method", METHODS)
def test_jobs_differ_in_their_method_only(method: str) -> None:
    reference = plan_of(JOBS / "fedavg").resolved()
    own = plan_of(JOBS / method).resolved()
    assert {key for key in reference if reference[key] != own[key]} <= {"algorithm"}


@pytest.mark.long
@over_all("path", sorted(JOBS.glob("*/plans/*.yaml")))
def test_a_job_s_further_plans_load_and_are_of_its_method(path: Path) -> None:
    assert load_plan(path).algorithm.name == path.parents[1].name


def pack(job: Path, destination: Path, changes: Sequence[str] = ()) -> Path:
    write_job(destination, plan_of(job, changes), job)
    return destination


def test_packing_resolves_the_plan_and_its_minimum(tmp_path: Path) -> None:
    changes = ["participation.minimum=2", "participation.when_missing=continue", "training.rounds=3"]
    job = pack(JOBS / "fedavg", tmp_path / "job", changes)
    plan = load_plan(job / CONFIG / "plan.yaml")
    assert plan.hash == plan_of(JOBS / "fedavg", changes).hash
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 2
    assert not (job / CUSTOM).exists()
    with pytest.raises(MedsiloError, match="exists; choose another path"):
        pack(JOBS / "fedavg", tmp_path / "job")


def test_what_a_job_asks_of_hospitals_stays_when_it_is_packed(tmp_path: Path) -> None:
    job = pack(JOBS / "fedavg", tmp_path / "job")
    meta = json.loads((job / "meta.json").read_text())
    wishes = {"resource_spec": {"hospital-a": {"num_of_gpus": 1}}, "scope": "public"}
    (job / "meta.json").write_text(json.dumps({**meta, **wishes, "min_clients": 9}))
    again = json.loads((pack(job, tmp_path / "again") / "meta.json").read_text())
    assert again == {**meta, **wishes}
    (job / "meta.json").write_text("{")
    with pytest.raises(MedsiloError, match=r"meta\.json .*; pack it again"):
        pack(job, tmp_path / "third")


def test_another_plan_goes_into_the_job_that_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = JOBS / "fedavg/plans/nifti-folder.yaml"
    arguments = ["--plan", str(plan), "--set", "training.rounds=3"]
    assert cli.main(["submit", str(JOBS / "fedavg"), *arguments, "-o", str(tmp_path / "job")]) == 0
    assert plan_of(tmp_path / "job") == load_plan(plan, ["training.rounds=3"])
    assert cli.main(["disclosure", str(JOBS / "fedavg"), *arguments]) == 0
    told = capsys.readouterr().out
    assert "task nifti-folder" in told and "1 to 3" in told
    assert cli.main(["submit", str(plan), "-o", str(tmp_path / "other")]) == 1
    assert "--plan" in capsys.readouterr().err


def test_the_jobs_method_is_enough_beside_another_methods_plan() -> None:
    plan = JOBS / "fedavg/plans/nifti-folder.yaml"
    changed = plan_of(JOBS / "fedsm", ["algorithm.pull=0.5"], plan)
    assert changed.algorithm == load_plan(JOBS / "fedsm" / CONFIG / "plan.yaml", ["algorithm.pull=0.5"]).algorithm
    assert changed.task == load_plan(plan).task and changed.algorithm.pull == 0.5
    assert plan_of(JOBS / "fedsm", ["algorithm.pull=0.5"]).algorithm.pull == 0.5
    assert plan_of(JOBS / "fedsm", ["algorithm.name=fedsm"], plan).algorithm.name == "fedsm"
    with pytest.raises(MedsiloError, match="--set algorithm.name=fedavg: the job's method is fedsm; leave it out"):
        plan_of(JOBS / "fedsm", ["algorithm.name=fedavg"], plan)


def test_an_unknown_job_lists_those_that_are_there() -> None:
    with pytest.raises(MedsiloError) as error:
        find_job(JOBS / "nonsense")
    assert "nonsense" in str(error.value) and ", ".join(sorted(METHODS)) in str(error.value)
    with pytest.raises(MedsiloError, match=r"did you mean .*jobs/fedavg\?"):
        find_job(JOBS / "fedavgg")
    with pytest.raises(MedsiloError, match="lies in a job"):
        find_job(JOBS / "fedavg/app")


def test_a_job_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(JOBS.parent)
    assert find_job("fedavg") == find_job("jobs/fedavg") == Path("jobs/fedavg")


def test_a_job_comes_with_medsilo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fedavg", "jobs/fedavg"):
        found = find_job(name)
        assert found == find_job(found) == SHIPPED / "fedavg" and scope_of(name) is None
        assert plan_of(name, ["seed=3"]) == plan_of(JOBS / "fedavg", ["seed=3"])
        assert files(pack(found, tmp_path / name)) == files(pack(JOBS / "fedavg", tmp_path / "by-hand" / name))
    for name in ("README.md", "fedsm/plans", "../fedavg", "jobs"):
        with pytest.raises(MedsiloError, match="no job at"):
            find_job(name)
    with pytest.raises(MedsiloError, match=r"did you mean fedavg\?"):
        find_job("fedavgg")


def test_a_wheel_has_every_file_of_a_job(root: Path, tmp_path: Path) -> None:
    given = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["medsilo"]
    # the build of medsilo's wheel copies all files of the jobs, as copytree does
    shutil.copytree(JOBS, place := tmp_path / "medsilo/jobs")
    matched = {path for pattern in given for path in (tmp_path / "medsilo").glob(pattern)}
    assert {path for path in place.rglob("*") if path.is_file()} <= matched


def test_names_take_the_place_of_a_number_of_hospitals() -> None:
    own = plan_of(JOBS / "fedsm")
    assert (own.participation.sites, own.participation.required) == ((), 3)
    two = plan_of(JOBS / "fedsm", ["participation.sites=[b, a]"])
    assert (two.participation.sites, two.participation.required) == (("a", "b"), 2)
    here = own.on_one_machine
    assert here.participation.sites == ("hospital-a", "hospital-b", "hospital-c") and here.participation.minimum is None
    there = own.among(["site-1", "on", "7", "site-2"])
    assert (there.participation.sites, there.participation.required) == (("7", "on", "site-1", "site-2"), 3)
    assert len(own.layout()["experts"]) == 3 and len(there.layout()["experts"]) == 4
    assert there.among(["x"]) is there


def test_hospitals_on_one_machine_have_names_before_anything_is_changed() -> None:
    def here(*changes: str) -> tuple:
        own = plan_of(JOBS / "fedsm", changes, local=True).participation
        return own.sites, own.evaluation_sites, own.minimum

    three = ("hospital-a", "hospital-b", "hospital-c")
    assert here() == (three, (), None)
    assert here("participation.sites=[x]") == (("x",), (), None)
    assert here("participation.evaluation_sites=[z]") == (three, ("z",), None)
    assert here("participation.minimum=2", "participation.when_missing=continue") == (three, (), 2)


def test_a_component_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    job = pack(JOBS / "fedavg", tmp_path / "job")
    path = job / CONFIG / "config_fed_server.json"
    path.write_text(path.read_text().replace("MedsiloController", "MedsiloControler"))
    with pytest.raises(MedsiloError, match=r"config_fed_server.json: .*MedsiloControler"):
        check_components(job)


def said_of(job: Path, capsys: pytest.CaptureFixture, *command: str) -> str:
    assert cli.main([command[0], str(job), *command[1:]]) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("medsilo: ") and "Traceback" not in told
    return told


@pytest.mark.slow
@over_all("content", [b"\xff\xfe", b"{", b"[]", b'{"workflows": 7}', b'{"workflows": ["x"]}', b"[" * 100_000, b"null"])
def test_a_damaged_configuration_is_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for name in (CONFIG / SERVER, CONFIG / CLIENT, Path(META)):
        job = pack(JOBS / "fedavg", folder / name.name)
        (job / name).write_bytes(content)
        if name == Path(META) and b"workflows" in content:
            continue  # NVFlare, and not medsilo, reads this key of meta.json
        if name != CONFIG / CLIENT or b'"x"' not in content:
            assert name.name in said_of(job, capsys, "submit", "-o", str(folder / f"out-{name.name}"))


@pytest.mark.slow
@over_all("name", ["meta.json", "app/config/plan.yaml", "app/config/config_fed_server.json", "app/custom/own.py", "x"])
def test_no_link_leads_out_of_a_job(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A job's folder must not contain pipes, links that lead out of the folder, or files above the size limit."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    job, kept = pack(JOBS / "fedavg", folder / "job"), folder / "secret"
    kept.write_text("{}")
    (job / name).parent.mkdir(exist_ok=True)
    commands = ("submit", "-o", str(folder / "out")), ("disclosure",)
    for target in (Path("/dev/zero"), kept, Path("../secret"), None):
        (job / name).unlink(missing_ok=True)
        (job / name).symlink_to(target) if target else os.mkfifo(job / name)
        for command in commands:
            assert Path(name).name in said_of(job, capsys, *command)
    (job / name).unlink()
    with (job / name).open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # a sparse file takes no space on the disk
    assert Path(name).name in said_of(job, capsys, "disclosure")


def test_a_link_within_a_job_is_none_out_of_it(tmp_path: Path) -> None:
    job = pack(JOBS / "fedavg", tmp_path / "job")
    (job / "plan.yaml").symlink_to("app/config/plan.yaml")
    assert plan_of(job).hash == plan_of(JOBS / "fedavg").hash


def test_a_recipe_s_job_is_submitted_with_its_first_model(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text("import medsilo.client as flare\n")
    script, model = str(tmp_path / "client.py"), torch.nn.Linear(4, 2)
    recipe = FedAvgRecipe(name="mine", model=model, min_clients=2, num_rounds=1, train_script=script)
    recipe.export(str(tmp_path / "jobs"))
    job, written = tmp_path / "jobs/mine", tmp_path / "written"
    assert cli.main(["submit", str(job), "-o", str(written)]) == 0
    first = Path("app/config/initial.safetensors")
    assert (written / first).read_bytes() == (job / first).read_bytes()
    assert {path.relative_to(written) for path in written.rglob("*") if path.is_file()} == {
        path.relative_to(job) for path in job.rglob("*") if path.is_file()
    }
