"""The plan as a recipe of NVFlare: the same job, and the same tensors, as everywhere else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nvflare.apis.job_def import JobMetaKey
from nvflare.recipe import PocEnv, SimEnv, set_recipe_meta

from medsilo.core.errors import MedsiloError
from medsilo.federation import inprocess
from medsilo.flare.filters import OnlyTheseGroups
from medsilo.flare.jobs import META, pack
from medsilo.flare.recipe import MedsiloRecipe
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.unit.test_jobs import JOBS, files

PAIR = SITES[:2]


@pytest.mark.slow
def test_a_recipe_in_nvflare_s_simulation_equals_the_loop(tmp_path: Path) -> None:
    recipe = MedsiloRecipe(make_plan("fedbn"), sites=PAIR, settings=SiteSettings(device="cpu"))
    inprocess.run(make_plan("fedbn", sites=PAIR), folder=tmp_path / "loop")
    run = recipe.execute(SimEnv(clients=recipe.sites, workspace_root=str(tmp_path / "simulation")))
    (study,) = Path(run.get_result(), "medsilo").glob("[!_]*")  # beside what a hospital remembers
    assert_same_outcome(tmp_path / "loop", study)


@pytest.mark.parametrize("with_code", [False, True])
def test_the_exported_job_is_the_packed_one(with_code: bool, tmp_path: Path) -> None:
    changes = ["training.rounds=3"]
    packed = pack(JOBS / "fedprox", tmp_path / "packed", changes, with_code)
    MedsiloRecipe(JOBS / "fedprox", changes, with_code=with_code).export(str(tmp_path))
    assert files(tmp_path / "fedprox") == files(packed)


def test_a_recipe_is_made_of_a_plan_its_file_or_a_job(tmp_path: Path) -> None:
    path = JOBS / "fedavg/app/config/plan.yaml"
    plans = [MedsiloRecipe(given, ["seed=3"], PAIR).plan for given in (make_plan("fedavg"), str(path), JOBS / "fedavg")]
    assert [plan.seed for plan in plans] == [3, 3, 3]
    assert all(plan.participation.sites == tuple(PAIR) for plan in plans)
    assert plans[1] == plans[2] != plans[0]


def test_what_nvflare_sets_in_the_meta_data_is_there(tmp_path: Path) -> None:
    recipe = MedsiloRecipe(make_plan("fedavg"), with_code=True)
    set_recipe_meta(recipe, JobMetaKey.SCOPE, "public")
    set_recipe_meta(recipe, JobMetaKey.CUSTOM_PROPS, {"ours": "x"})
    recipe.export(str(tmp_path))
    meta = json.loads((tmp_path / "fedavg" / META).read_text())
    assert meta["scope"] == "public" and meta["custom_props"].keys() == {"ours", "medsilo"}
    assert meta["deploy_map"] == {"app": ["server", *SITES]}


def test_what_can_not_be_part_of_the_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = MedsiloRecipe(make_plan("fedavg"))
    for add in (
        lambda: recipe.add_client_output_filter(OnlyTheseGroups(["model"])),
        lambda: recipe.add_client_config({"key": "value"}),
        lambda: recipe.add_client_file(str(JOBS / "fedavg" / META)),
        lambda: recipe.add_server_file(str(JOBS / "fedavg" / META)),
        lambda: recipe.export(str(tmp_path / "exported"), server_exec_params={"key": 1}),
    ):
        with pytest.raises(MedsiloError, match="can't be added to a medsilo recipe: write it into a job's folder"):
            add()
    with pytest.raises(MedsiloError, match="in its own medsilo.yaml"):
        MedsiloRecipe(make_plan("fedavg")).set_per_site_config({SITES[0]: {"device": "cpu"}})
    with pytest.raises(MedsiloError, match="pools all data and never runs on NVFlare"):
        MedsiloRecipe(make_plan("central"))
    with pytest.raises(MedsiloError, match=r"the plan names .*; give SimEnv clients=recipe\.sites"):
        recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path)))
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    with pytest.raises(MedsiloError, match="give with_code=True"):
        recipe.execute(PocEnv(num_clients=3, clients=SITES))
    assert not (tmp_path / "poc").exists()


def test_the_example_of_the_documentation_runs(root: Path, tmp_path: Path) -> None:
    """With a smaller task and fewer rounds, and NVFlare's own --export."""
    page = (root / "docs/python.md").read_text()
    code = page.split("## A plan as an NVFlare recipe", 1)[1].split("```py\n", 1)[1].split("```", 1)[0]
    assert len(code.splitlines()) <= 10
    smaller = code.replace("training.rounds=3", "training.rounds=1").replace('"jobs/', f'"{JOBS}/')
    assert smaller.count("training.rounds=1") == 1
    (tmp_path / "job.py").write_text(smaller)
    command = [sys.executable, "job.py"]
    subprocess.run([*command, "--export", "--export-dir", "exported"], cwd=tmp_path, check=True, timeout=120)
    assert files(tmp_path / "exported/fedbn") == files(pack(JOBS / "fedbn", tmp_path / "packed", ["training.rounds=1"]))
