"""Test the scores of each site's model on each site's test cases: the values, the table, and the errors."""

import shutil
from pathlib import Path

import pytest
import torch

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.plan import Plan
from medsilo_lab.engines import inprocess
from medsilo_server.record import Record
from results.cross import cross
from tests.conftest import PERSONAL, SITES, make_plan

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    plan, folder = make_plan("local", *SMALL), tmp_path_factory.mktemp("runs") / "local"
    inprocess.run(plan, folder=folder)
    return plan, folder


@pytest.fixture
def copied(finished: tuple[Plan, Path], tmp_path: Path) -> tuple[Plan, Path]:
    return finished[0], Path(shutil.copytree(finished[1], tmp_path / "local"))


def accuracy(plan: Plan, owner: dict[str, torch.Tensor], site: str) -> float:
    model = plan.build_networks()["model"]
    model.load_state_dict(owner)
    inputs, targets = plan.task.load(site, SITES, plan.seed, None).test.tensors
    with torch.no_grad():
        return float((model.eval()(inputs).argmax(1) == targets).double().mean())


def test_each_model_is_tested_at_each_site(copied: tuple[Plan, Path]) -> None:
    plan, folder = copied
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    scores = cross(folder)
    models = {site: load_tensors(folder / "sites" / site / "best.safetensors")[0] for site in SITES}
    expected = {owner: {site: accuracy(plan, models[owner], site) for site in SITES} for owner in SITES}
    assert scores == {owner: pytest.approx(row) for owner, row in expected.items()}
    # equal scores would hide a mix-up of models
    assert len({value for row in expected.values() for value in row.values()}) > 6
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedbn", *PERSONAL])
def test_on_the_diagonal_is_what_the_summary_says(method: str, tmp_path: Path) -> None:
    inprocess.run(make_plan(method, *SMALL), folder=tmp_path / "run")
    scores, summary = cross(tmp_path / "run"), Record(tmp_path / "run").summary()
    assert {site: scores[site][site] for site in SITES} == {
        site: summary.sites[site].test["accuracy"] for site in SITES
    }
    rows = [list(row.values()) for row in scores.values()]
    assert (rows[0] == rows[1] == rows[2]) == (method == "fedavg")


@pytest.mark.parametrize("case", ["elsewhere", "central", "stopped", "no run", "no data"])
def test_what_cannot_be_compared_is_one_clear_line(case: str, copied: tuple[Plan, Path]) -> None:
    _, folder = copied
    if case == "elsewhere":  # in a study over NVFlare, the server has no model of a single site
        shutil.rmtree(folder / "sites" / SITES[2])
        words = "run local has no model of hospital-c: its sites keep their models and data"
    elif case == "central":
        shutil.rmtree(folder)
        inprocess.run(make_plan("central", *SMALL), folder=folder)
        words = "run local has no model of hospital-a, hospital-b, hospital-c"
    elif case == "no data":
        (folder / "plan.yaml").write_text(make_plan("local", "task.name=activity-windows").to_yaml())
        words = "task activity-windows needs data: set 'data'"
    else:
        (folder / "summary.json").unlink()
        words = "run local has not finished"
        if case == "no run":
            shutil.rmtree(folder)
            words = "local is no run's folder"
    with pytest.raises(MedsiloError) as caught:
        cross(folder)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
