"""NVFlare runs medsilo's unchanged job folders with `nvflare simulator` and in POC mode."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from medsilo.flare.job_source import PLAN
from medsilo.flare.jobs import plan_of
from medsilo.recipes import FedBNRecipe
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess
from tests.conftest import METHODS, SITES
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import Consortium

JOBS = Path(__file__).resolve().parents[2] / "jobs"
NVFLARE = Path(sys.executable).with_name("nvflare")
ENDED = 1800.0
THREE = ["site-1", "site-2", "site-3"]


def short(method: str, folder: Path, rounds: int = 1) -> Path:
    job = folder / method
    shutil.copytree(JOBS / method, job, ignore=shutil.ignore_patterns("plans"))
    plan = (job / PLAN).read_text()
    (job / PLAN).write_text(plan.replace("rounds: 8", f"rounds: {rounds}"))
    return job


def nvflare(folder: Path, *words: str | Path, code: int = 0, **environment: str) -> str:
    """Run an NVFlare command, assert that the command's exit code is `code`, and return the command's output."""
    folder.mkdir(exist_ok=True)
    home = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([NVFLARE, *words], cwd=folder, env=home, capture_output=True, text=True, timeout=ENDED)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == code, said
    return said


def simulated(job: Path, folder: Path, *options: str) -> Path:
    said = nvflare(folder, "simulator", job, "-w", folder / "workspace", *options)
    studies = [*folder.glob("workspace/server/medsilo/*/summary.json")]
    assert len(studies) == 1, said
    (study,) = (path.parent for path in studies)
    # the list finds all folders of sites before the first copy, because the search would otherwise also find copies
    for own in [*folder.glob(f"workspace/*/medsilo/{study.name}/{paths.SITES}/*")]:
        shutil.copytree(own, study / paths.SITES / own.name)
    return study


def alone(job: Path, folder: Path, sites: list[str]) -> Path:
    inprocess.run(plan_of(job).among(sites), folder=folder, settings=SiteSettings(device="cpu"))
    return folder


@pytest.mark.first
@pytest.mark.parametrize(
    ("method", "options", "sites"),
    [
        # FedSM's plan must name the sites, but the plan of FedSM's job in jobs/ names none
        pytest.param("fedsm", ["-n", "3", "-t", "3"], THREE, marks=pytest.mark.slow),
        pytest.param("fedbn", ["-c", ",".join(SITES), "-t", "3"], SITES, marks=pytest.mark.long),
        pytest.param("scaffold", ["-n", "4", "-t", "2"], [*THREE, "site-4"], marks=pytest.mark.long),
    ],
)
def test_the_simulator_runs_a_job_as_it_is(method: str, options: list[str], sites: list[str], tmp_path: Path) -> None:
    job = short(method, tmp_path)
    study = simulated(job, tmp_path / "simulator", *options)
    assert sorted(read_summary(study).sites) == sites
    assert_same_outcome(alone(job, tmp_path / "alone", sites), study)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_the_simulator_runs_every_job_with_one_thread(method: str, tmp_path: Path) -> None:
    """Each answer comes from a new process, so the site must read its state from disk."""
    job = short(method, tmp_path, rounds=2)
    study = simulated(job, tmp_path / "simulator", "-n", "3", "-t", "1")
    summary = read_summary(study)
    assert summary.finished and sorted(summary.sites) == THREE
    assert_same_outcome(alone(job, tmp_path / "alone", THREE), study)


@pytest.mark.long
def test_too_few_sites_are_told(tmp_path: Path) -> None:
    words = ["simulator", short("fedavg", tmp_path), "-w", tmp_path / "w", "-n", "2", "-t", "2"]
    said = nvflare(tmp_path, *words, code=2)
    assert "(site-1, site-2) but the plan needs 3" in said


def started_from(workspace: Path) -> list[psutil.Process]:
    """Return the processes whose command line names this workspace, because the processes of POC mode have no parent
    process.
    """
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(str(workspace) in word for word in process.info["cmdline"] or ())]


WIDE = """
from torch import nn

class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1100, 1100), nn.BatchNorm1d(1100), nn.Linear(1100, 2))
"""
SCRIPT = """
import torch
from wide import Wide
import medsilo.client as flare

flare.init()
model, cases = Wide(), (torch.eye(8, 1100), torch.tensor([0, 1] * 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flare.join(model, optimizer, [cases], samples=8)
while flare.is_running():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(cases[0]), cases[1]).backward()
    optimizer.step()
    flare.send({"accuracy": 0.5})
"""


def script_with_a_large_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe's job with a tensor of 4 MiB, because the http driver of POC mode closes a connection at a
    message of 4 MiB.
    """
    folder.mkdir()
    (folder / "wide.py").write_text(WIDE)
    (folder / "client.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    model = importlib.import_module("wide").Wide()
    assert max(own.nbytes for own in model.parameters()) > 4 << 20
    recipe = FedBNRecipe(name="wide", model=model, min_clients=3, num_rounds=2, train_script="client.py", sites=THREE)
    recipe.export("exported")
    return folder / "exported/wide"


@pytest.mark.long
@pytest.mark.xdist_group("poc")  # POC mode uses fixed ports
def test_poc_mode_runs_a_job_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, workspace = tmp_path / "home", tmp_path / "poc"
    place = {"NVFLARE_POC_WORKSPACE": str(workspace)}
    jobs = {"fedsm": short("fedsm", tmp_path), "fedbn": script_with_a_large_tensor(tmp_path / "script", monkeypatch)}
    nvflare(own, "poc", "prepare", "-n", "3", **place)
    try:
        # NVFlare's default of 30 seconds is too short on a busy machine
        nvflare(own, "poc", "start", "--timeout", "300", **place)
        for folder in jobs.values():
            told = nvflare(own, "job", "submit", "-j", folder, "--format", "json", **place)
            job = json.loads(told[told.index("{") : told.rindex("}") + 1])["data"]["job_id"]
            nvflare(own, "job", "wait", job, "--timeout", "300", **place)
            nvflare(own, "job", "download", job, **place)
    finally:
        try:
            nvflare(own, "poc", "stop", **place)
        finally:
            Consortium.end(*started_from(workspace))
    found = [read_summary(path.parent) for path in own.glob("*/workspace/medsilo/*/summary.json")]
    assert sorted(summary.method for summary in found) == sorted(jobs)
    assert all(summary.finished and sorted(summary.sites) == THREE for summary in found)
