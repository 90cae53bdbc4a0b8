"""An ensemble averages several runs' models, is tested at each site, and rejects runs of different studies."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import medsilo
from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors
from medsilo.plan import Plan
from medsilo.tasks.own.patient_table import PatientTable
from medsilo.tasks.scans import Scan
from medsilo_lab.deploy.source import Committee, Source
from medsilo_lab.engines import inprocess
from medsilo_server.record import Record
from results.cross import committee_scores
from tests.conftest import SITES, make_plan
from tests.hospital import Volume, write_volume
from tests.unit.deploy.test_predict import drawn, oblique, small_plan, write_run

SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16"]
METHODS = ("local", "fedavg", "fedsm")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        inprocess.run(make_plan(method, *SMALL), folder=folder / method)
    return [folder / method for method in METHODS]


class Says(nn.Module):
    def __init__(self, output: list[float]) -> None:
        super().__init__()
        self.register_buffer("output", torch.tensor([output]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.output.expand(len(inputs), -1)


def together(task: PatientTable, *outputs: list[float]) -> torch.Tensor:
    return Committee(task, [Says(output) for output in outputs])(torch.zeros(1, 2))[0]


def probabilities(run: Path, site: str, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
    model = plan.build_networks()["model"]
    model.load_state_dict(load_tensors(run / "sites" / site / "best.safetensors")[0])
    with torch.no_grad():
        return model.eval()(inputs).softmax(1)


@pytest.mark.slow
def test_every_sites_models_are_scored_together_and_alone(runs: list[Path]) -> None:
    own, shared, supermodel = runs
    kept = {path: path.read_bytes() for run in runs for path in run.rglob("*") if path.is_file()}
    scores, alone = committee_scores([own, shared])
    plan = make_plan("local", *SMALL)
    for site in SITES:
        inputs, targets = plan.task.load(site, SITES, plan.seed, None).test.tensors
        mean = probabilities(own, site, plan, inputs) + probabilities(shared, site, plan, inputs)
        assert scores[site] == pytest.approx(float((mean.argmax(1) == targets).double().mean()))
    every, told = committee_scores([own, shared, supermodel])
    for run in runs:
        summary = Record(run).summary()
        assert told[run.name] == {site: summary.sites[site].test["accuracy"] for site in SITES}
    assert alone == {name: told[name] for name in ("local", "fedavg")} and set(every) == set(SITES)
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.slow
def test_what_does_not_fit_together_is_one_line(runs: list[Path], tmp_path: Path) -> None:
    inprocess.run(make_plan("fedavg", *SMALL, sites=list(SITES[:2])), folder=tmp_path / "fewer")
    inprocess.run(make_plan("fedavg", *SMALL[:-2], "task.steps=64"), folder=tmp_path / "longer")
    for given, words in (
        (runs[:1], "one model alone is no committee"),
        ([runs[0], runs[0]], "two of these runs have the same name"),
        ([runs[0], tmp_path / "fewer"], "run fewer has other hospitals than the first"),
        ([runs[0], tmp_path / "longer"], "trained for different tasks"),
        ([runs[0], tmp_path], "is no run's folder"),
    ):
        with pytest.raises(MedsiloError, match=words) as caught:
            committee_scores(given)
        assert "\n" not in str(caught.value)
    with pytest.raises(MedsiloError, match="17 models are.*give 16 at most"):
        Source.together([Source(Says([0.0]), make_plan("fedavg", *SMALL), {})] * 17)


def test_a_mask_is_what_the_mean_of_all_models_says(tmp_path: Path) -> None:
    """An ensemble predicts a mask from the mean output of a hospital's personal model and a shared model."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    one = write_run(own, small_plan("fedbn"), "best.safetensors")
    other = write_run(shared, plan := small_plan(), "global/best.safetensors")
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    save_tensors(shared / "global/best.safetensors", other.state_dict(), {"plan_hash": plan.hash})
    values = drawn((6, 32, 32))
    write_volume(scan := tmp_path / "scan.nii", Volume(values, oblique((0.6, 0.6, 3.0))), "PIR")
    out = tmp_path / "out"
    assert cli.main(["predict", str(own), str(scan), "--with", str(shared), "-o", str(out)]) == 0
    with torch.no_grad():
        said = [network(torch.from_numpy(values)[:, None]).softmax(1) for network in (one, other)]
    mask = Scan.of_mask(out / "scan_mask.nii").values[0]
    assert np.array_equal(mask, (said[0] + said[1]).argmax(1))
    assert all((mask != own.argmax(1).numpy()).any() for own in said)
    model = json.loads((out / "predictions.json").read_text())["model"]
    assert model["kind"] == "committee" and [own["kind"] for own in model["members"]] == ["model", "model"]
    medsilo.predict([own, shared], scan, tmp_path / "again")
    assert (tmp_path / "again/scan_mask.nii").read_bytes() == (out / "scan_mask.nii").read_bytes()
