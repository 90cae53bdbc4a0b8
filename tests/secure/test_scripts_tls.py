"""A training script over mutual TLS, with real kits: a hospital that dies and comes back changes nothing."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from medsilo.core.files import load_tensors
from medsilo.runs import paths
from tests.secure.consortium import Consortium, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("scripts over TLS")]
HOSPITALS = ["hospital-1", "hospital-2", "hospital-3"]
EXPORT = """
import torch
from model import Net
from medsilo.recipes import {method}Recipe
torch.manual_seed(0)
recipe = {method}Recipe(
    name="tls", model=Net(), min_clients=3, num_rounds={rounds}, train_script="client.py",
    plan={{"participation": {{"when_missing": "wait"}}}},
)
recipe.export("jobs")
"""


@pytest.fixture(scope="module")
def teaching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Three hospitals that let a lead bring code."""
    consortium = Consortium(tmp_path_factory.mktemp("scripts"), dict.fromkeys(HOSPITALS, "teaching-hospital"))
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def exported(root: Path, folder: Path, method: str, rounds: int) -> Path:
    """Export an example's recipe as a job, and return its folder."""
    shutil.copytree(root / "examples/hello-fedbn", folder)
    code = EXPORT.format(method=method, rounds=rounds)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=120)
    return folder / "jobs/tls"


def models(consortium: Consortium, study: str) -> list[dict[str, torch.Tensor]]:
    """Return each hospital's last model of a study."""
    folders = [consortium.kit(site) / "medsilo" / study / "sites" / site for site in HOSPITALS]
    return [load_tensors(folder / paths.LAST)[0] for folder in folders]


def studies(consortium: Consortium) -> set[str]:
    return {path.parent.name for path in (consortium.kit("localhost") / "medsilo").glob(f"*/{paths.SUMMARY}")}


def is_after(study: Path, earlier: set[str]) -> bool:
    """Whether a hospital has trained two rounds of another study than the earlier ones."""
    return study.name not in earlier and bool(list(study.glob("sites/*/state-2.safetensors")))


@pytest.mark.long
def test_a_hospital_that_dies_and_comes_back_ends_with_the_same_tensors(
    teaching: Consortium, root: Path, tmp_path: Path
) -> None:
    before = studies(teaching)
    job = exported(root, tmp_path / "work", "FedBN", 6)
    assert teaching.run(job) == "FINISHED:COMPLETED"
    (undisturbed,) = studies(teaching) - before

    session = teaching.session()
    try:
        job_id = session.submit_job(str(job))
        kept = teaching.kit("hospital-2") / "medsilo"
        others = before | {undisturbed}
        wait_until(lambda: any(is_after(path, others) for path in kept.iterdir()), 120, "its second round")
        teaching.restart("hospital-2")
        wait_until(lambda: str(session.get_job_status(job_id)).startswith("FINISHED"), 300, "the job's end")
        assert str(session.get_job_status(job_id)) == "FINISHED:COMPLETED"
    finally:
        session.close()
    (disturbed,) = studies(teaching) - others
    summary = json.loads((teaching.kit("localhost") / "medsilo" / disturbed / paths.SUMMARY).read_text())
    assert summary["status"] == "finished" and summary["rounds"]["done"] == 6
    for one, other in zip(models(teaching, undisturbed), models(teaching, disturbed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
