"""The examples of training scripts, as a user runs them: NVFlare's simulator ends with a result that has learned."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.client import super_model
from medsilo.core.files import load_tensors
from medsilo.runs import paths

# Lightning imports torchvision, which can't be imported beside a torch without CUDA: two of its operators are missing.
WHOLE_TORCHVISION = """
import torch

try:
    import torchvision
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""


def simulated(
    root: Path, folder: Path, name: str, *arguments: str, changes: Mapping[str, str] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Run an example's job.py; returns the server's folder of the run, and its summary.

    changes: what the script says instead.
    """
    place = folder / name
    shutil.copytree(root / "examples" / name, place, dirs_exist_ok=True)
    script = place / "client.py"
    for own, instead in (changes or {}).items():
        assert own in script.read_text()
        script.write_text(script.read_text().replace(own, instead))
    said = subprocess.run(
        [sys.executable, "job.py", "--workspace", "workspace", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = list(place.glob(f"workspace/{name}/server/medsilo/*/{paths.SUMMARY}"))
    assert said.returncode == 0 and len(found) == 1, said.stderr[-2000:]
    summary = json.loads(found[0].read_text())
    assert summary["status"] == "finished" and f"medsilo report {found[0].parent}" in said.stdout
    return found[0].parent, summary


def gains(summary: dict[str, Any]) -> list[float]:
    """How much each site's score has risen from the first round to the last that has one."""
    scores = [[score for score in own["validation"] if score is not None] for own in summary["sites"].values()]
    return [own[-1] - own[0] for own in scores]


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hello_fedbn_keeps_each_sites_batch_norm(external: bool, root: Path, tmp_path: Path) -> None:
    """external: by a process of the script's own, whose tensors the server refused to fetch."""
    script = (root / "examples/hello-fedbn/client.py").read_text()
    (line,) = (line for line in script.splitlines() if "flare.init()" in line)
    looks = "from medsilo.flare.script_process import _gates; assert 8 << 20 < _gates[0].most.size < 20 << 20"
    changes = {line: f"{line}; {looks}"}  # of the process that receives
    run, summary = simulated(root, tmp_path, "hello-fedbn", *["--external"] * external, changes=changes)
    assert min(gains(summary)) > 0.1
    models = [
        load_tensors(paths.site_folder(place, place.parents[1].name) / paths.LAST)[0]
        for place in sorted(run.parents[2].glob("site-*/medsilo/*"))
    ]
    assert len(models) == 3
    for name in models[0]:
        same = all(torch.equal(models[0][name], other[name]) for other in models[1:])
        assert same == (not name.startswith("features.1.") or name.endswith("num_batches_tracked")), name


@pytest.mark.long
@pytest.mark.parametrize("method", ["HarmoFL", "FedSM"])
def test_a_monai_script_learns_by_harmofl_and_fedsm(method: str, root: Path, tmp_path: Path) -> None:
    run, summary = simulated(root, tmp_path, "monai-segmentation", "--method", method)
    assert min(gains(summary)) > 0.03  # .08 to .57 on the processors tried: sums round differently on each
    if method == "FedSM":
        sys.path.insert(0, str(root / "examples/monai-segmentation"))
        try:
            from model import unet  # type: ignore[import-not-found]
        finally:
            sys.path.pop(0)
        model = super_model(run / paths.SUPER_MODEL, unet())
        assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 2, 64, 64)


@pytest.mark.long
def test_adafed_mixes_studies_of_a_table_by_their_statistics(root: Path, shared_data: Path, tmp_path: Path) -> None:
    _, summary = simulated(root, tmp_path, "tabular", "--table", str(shared_data / "impact/impact.csv"), "--sites", "3")
    weights = torch.tensor(summary["details"]["similarity"]["weights"])
    assert torch.allclose(weights.sum(1), torch.ones(3)) and (weights.diagonal() == 0.5).all()
    assert len({round(float(weight), 6) for weight in weights[0, 1:]}) == 2
    assert min(own["test"]["auc"] for own in summary["sites"].values()) > 0.7


@pytest.mark.slow
def test_lightnings_trainer_trains_both_networks_of_ditto(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before/sitecustomize.py"
    before.parent.mkdir()
    before.write_text(WHOLE_TORCHVISION)
    monkeypatch.setenv("PYTHONPATH", str(before.parent))
    assert min(gains(simulated(root, tmp_path, "lightning")[1])) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("method", ["FedBN", "Ditto", "FedSM"])
def test_a_script_that_is_started_anew_for_each_turn_ends_with_the_same_bits(
    method: str, root: Path, tmp_path: Path
) -> None:
    """With fewer threads than sites NVFlare's simulator ends the script's process after each answer."""
    ends = []
    loop = {
        "for _ in range(epochs)": "for net, optimizer in (own for own in flare.networks() for _ in range(epochs))",
        "model(images), labels": "net(images), labels",
        "optimizer, train_loader)": "optimizer, train_loader, validation=test_loader)",
    }
    for threads in ("3", "2", "1"):
        arguments = ("--method", method, "--threads", threads, "--rounds", "2")
        run, _ = simulated(root, tmp_path / threads, "hello-fedbn", *arguments, changes=loop)
        files = sorted(run.parents[2].glob(f"site-*/medsilo/*/sites/*/{paths.LAST}"))
        ends.append([load_tensors(file)[0] for file in files])
    for other in ends[1:]:
        assert len(other) == 3
        assert all(torch.equal(one[name], two[name]) for one, two in zip(ends[0], other, strict=True) for name in one)
