"""Every site's model on every site's test data: the numbers, the table, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors
from medsilo.federation import inprocess
from medsilo.plan import Plan
from medsilo.runs.record import Record
from results.cross import cross, main
from tests.conftest import PERSONAL, SITES, all_but_newer, make_plan

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A run of Local."""
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
    assert len({value for row in expected.values() for value in row.values()}) > 6  # else a mix-up would not show
    assert {path: path.read_bytes() for path in kept} == kept  # and nothing of the run is touched


@pytest.mark.slow
@pytest.mark.parametrize("method", all_but_newer("fedavg", "fedbn", *PERSONAL))
def test_on_the_diagonal_is_what_the_summary_says(method: str, tmp_path: Path) -> None:
    inprocess.run(make_plan(method, *SMALL), folder=tmp_path / "run")
    scores, summary = cross(tmp_path / "run"), Record(tmp_path / "run").summary()
    assert {site: scores[site][site] for site in SITES} == {
        site: summary.sites[site].test["accuracy"] for site in SITES
    }
    rows = [list(row.values()) for row in scores.values()]
    assert (rows[0] == rows[1] == rows[2]) == (method == "fedavg")


def test_models_with_an_input_layer(tmp_path: Path) -> None:
    inprocess.run(make_plan("harmofl", *SMALL), folder=tmp_path / "run")
    scores = cross(tmp_path / "run")
    assert scores[SITES[0]] == scores[SITES[1]]


def test_each_site_has_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A site that withholds its score, and two that don't."""
    (own := tmp_path / "config" / SITES[1]).mkdir(parents=True)
    (own / "medsilo.yaml").write_text("min_patients_per_metric: 1000\n")
    config = ["--settings", str(tmp_path / "config"), "--device", "cpu"]
    changes = [part for change in SMALL for part in ("--set", change)]
    place = ["--engine", "inprocess", "--out", str(tmp_path), "--name", "run"]
    changes = ["--set", "task.name=synthetic-activity", "--set", "training.rounds=2", *changes]
    assert cli.main(["run", "local", *place, *config, *changes]) == 0
    tests = [Record(tmp_path / "run").summary().sites[site].test["accuracy"] for site in SITES]
    assert [score is None for score in tests] == [False, True, False]
    (tmp_path / "config" / "stranger").mkdir()
    (tmp_path / "config" / "stranger" / "medsilo.yaml").touch()
    capsys.readouterr()
    assert main([str(tmp_path / "run"), *config]) == 1
    assert "medsilo.yaml for stranger" in capsys.readouterr().out


def test_another_model_than_the_tested_one_is_told(copied: tuple[Plan, Path]) -> None:
    _, folder = copied
    path = folder / "sites" / SITES[1] / "best.safetensors"
    tensors, facts = load_tensors(path)
    save_tensors(path, {name: tensor if "running" in name else -tensor for name, tensor in tensors.items()}, facts)
    with pytest.raises(MedsiloError, match=r"hospital-b's model has accuracy .* but"):
        cross(folder)


def test_a_site_that_was_lost_before_the_test_is_compared_all_the_same(copied: tuple[Plan, Path]) -> None:
    _, folder = copied
    summary = Record(folder).summary()
    lost = summary.sites[SITES[0]].changed(test=None)
    Record(folder).write_summary(summary.changed(sites={**summary.sites, SITES[0]: lost}))
    assert None not in cross(folder)[SITES[0]].values()


@pytest.mark.parametrize("case", ["elsewhere", "central", "stopped", "no run", "no data"])
def test_what_cannot_be_compared_is_one_clear_line(case: str, copied: tuple[Plan, Path]) -> None:
    _, folder = copied
    if case == "elsewhere":  # as between institutions: the server has no site's model
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


def test_the_tool_prints_the_table(copied: tuple[Plan, Path], capsys: pytest.CaptureFixture) -> None:
    _, folder = copied
    assert main([str(folder), "--device", "cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for owner, row in cross(folder).items():
        scores = [score or 0.0 for score in row.values()]
        assert [owner, *(f"{value:.3f}" for value in [*scores, sum(scores) / 3])] in lines
    assert main([str(folder / "nowhere")]) == 1
    assert capsys.readouterr().out.startswith("nowhere is no run's folder")
