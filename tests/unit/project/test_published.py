"""The lead's download contains no suppressed score, and no personal model of a hospital that did not agree to send it.

NVFlare's tools can read the metrics and the model in the download.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.metrics_artifact_writer import MetricsArtifactWriter
from nvflare.tool.job.job_cli import _discover_job_download_artifacts
from torch import Tensor

from medsilo.core.files import load_tensors
from medsilo.deploy.supermodel import SuperModel
from medsilo.flare.workspace import publish
from medsilo.plan import parse_plan
from medsilo.runs.reading import read_summary
from medsilo.site.settings import make_settings
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.coordinator import Coordinator
from medsilo_server.flare.artifacts import write_artifacts
from medsilo_server.record import Record
from tests.conftest import SITES, SMALL, make_plan
from tests.sites import site_of, with_settings
from tests.unit.medsilo_server.test_coordinator import Study

A, B, C = SITES
PHOTOS = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "image-folder", "kind": "classification", "labels": ["no", "yes"], "size": [8, 8]},
    "network": {"name": "small-cnn", "width": 2},
    "training": {"rounds": 2, "batch_size": 64},
    "participation": {"sites": SITES},
}


def published(run: Path, root: Path) -> Path:
    for name in ("startup", "local"):
        (root / name).mkdir(parents=True)
    workspace = Workspace(str(root), "server")
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace)
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job")
    publish(run, fl_ctx)
    job = Path(workspace.get_run_dir("job"))
    write_artifacts(run, job)
    return job


def trained_weights(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors that training always changes, so that equal tensors cannot be a coincidence."""
    return [tensor for tensor in tensors.values() if tensor.dim() > 1]


def holds(folder: Path, model: dict[str, Tensor]) -> bool:
    stored = [tensor for path in folder.rglob("*.safetensors") for tensor in load_tensors(path)[0].values()]
    return any(
        mine.shape == theirs.shape and torch.equal(mine, theirs) for mine in stored for theirs in trained_weights(model)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm", "fedsm-extra", "fedsm-ensemble"])
def test_the_download_has_the_models_of_those_that_agreed_and_no_others(method: str, tmp_path: Path) -> None:
    study = Study(make_plan(method, *SMALL), tmp_path / "run")
    with_settings(study.participants[C], share_personal_model=False)
    study.run()
    personal = {site: study.coordinator.state.aggregators["personal"].current(site) for site in SITES}
    download = published(study.folder, tmp_path / "server")
    assert SuperModel.load(download / "medsilo/run/supermodel").agreed == (A, B)
    assert [holds(download, personal[site]) for site in SITES] == [True, True, False]
    assert holds(study.folder / "checkpoints", personal[C])


@pytest.mark.parametrize("method", ["ditto", "fedbn", "apfl", "adafed"])
def test_a_personal_model_stays_with_its_hospital(method: str, tmp_path: Path) -> None:
    study = Study(make_plan(method, *SMALL), tmp_path / "run")
    study.run()
    download = published(study.folder, tmp_path / "server")
    assert (download / "medsilo/run/summary.json").exists()
    for site in SITES:
        own = load_tensors(study.folder / "sites" / site / "best.safetensors")[0]
        assert not holds(download, own) and holds(study.folder / "sites" / site, own)


def rounding_study(photos: Path, folder: Path) -> None:
    plan = parse_plan(PHOTOS)
    own: dict[str, dict[str, Any]] = {A: {}, B: {"min_patients_per_metric": 20}, C: {"public_data": True}}
    settings = {site: make_settings({"device": "cpu", "data": photos, **more}, "x") for site, more in own.items()}
    sites = {site: site_of(plan, site, SITES, settings[site], folder / "sites" / site) for site in SITES}
    Coordinator(plan, SITES, Loop(sites), Record(folder), "in-process").run()


def numbers_of(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {own["name"]: own["value"] for own in metrics}


def test_nvflares_download_finds_metrics_and_model_and_no_number_that_stays(
    photos: Path, known_key: None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rounding_study(photos, run)
    download = tmp_path / "download"
    # a lead who downloads the study by NVFlare's command gets this folder
    shutil.copytree(published(run, tmp_path / "server"), download / "workspace")

    found, missing = _discover_job_download_artifacts(str(download))
    assert missing == ["client_logs"]  # the logs of clients stay at the hospitals
    model, best = load_tensors(Path(found["global_model"]))[0], load_tensors(run / "global/best.safetensors")[0]
    assert model.keys() == best.keys() and all(torch.equal(model[name], best[name]) for name in best)

    lines = [json.loads(line) for line in Path(found["round_metrics"]).read_text().splitlines()]
    assert lines == [MetricsArtifactWriter()._fit_round_record(line) for line in lines]
    assert [line["round"] for line in lines] == [0, 1, 2]
    for line in lines:
        a, b, c = (numbers_of(site["metrics"]) for site in line["sites"])
        assert 0 < a["accuracy_high"] - a["accuracy_low"] <= 0.2 and "accuracy" not in a
        assert not [name for name in b if name.startswith(("accuracy", "validation"))]
        mean = numbers_of(line["aggregated_metrics"])
        assert "accuracy" not in mean
        for end in ("accuracy_low", "accuracy_high"):
            assert mean[end] == pytest.approx((a[end] + c["accuracy"]) / 2)
        skipped = {one["site"]: one["reason"] for one in line["skipped_metrics"] if one["name"] == "accuracy"}
        assert skipped == {A: "rounded_by_site", B: "not_reported"}
    shares = Record(run).rounds()[0].sites
    assert [site["weight"] for site in lines[0]["sites"]] == [shares[site].share for site in SITES]

    told, summary = json.loads(Path(found["metrics_summary"]).read_text()), read_summary(run)
    assert told["key_metric"]["name"] == "accuracy" and told["final_round"] == 2
    assert {told["best_round"]} == {*summary.selected.rounds.values()}
    assert told["best_metrics"] == lines[told["best_round"]]["aggregated_metrics"]
