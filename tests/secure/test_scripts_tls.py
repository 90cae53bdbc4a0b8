"""Over mutual TLS, a training script's results do not change if a hospital's processes die and return."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from medsilo.core.files import load_tensors
from medsilo.runs import paths
from medsilo_server.record import Record
from tests.secure.consortium import Consortium, wait_until
from tests.secure.relay import Relay

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("scripts over TLS")]
HOSPITALS, ROUNDS = ["hospital-1", "hospital-2", "hospital-3"], 6
EXPORT = """
import torch
from model import Net
from medsilo.recipes import {method}Recipe
torch.manual_seed(0)
recipe = {method}Recipe(
    name="tls", model=Net(), min_clients={many}, num_rounds={rounds}, train_script="client.py", seed=0,
    plan={{"participation": {{"when_missing": "wait", "resume": 30}}}},
)
if {external}:  # at these hospitals in a process of its own
    recipe.set_per_site_config({{own: {{"launch_external_process": own in {external}}} for own in {sites}}})
recipe.export("jobs")
"""


@pytest.fixture(scope="module")
def teaching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    consortium = Consortium(tmp_path_factory.mktemp("scripts"), dict.fromkeys(HOSPITALS, "teaching-hospital"))
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def exported(
    root: Path, folder: Path, method: str, rounds: int, sites: Sequence[str] = HOSPITALS, external: Sequence[str] = ()
) -> Path:
    """Export an example's recipe as a job, and return the job's folder; without a seed, a restarted script would
    shuffle cases in a different order.
    """
    shutil.copytree(root / "examples/hello-fedbn", folder)
    own = {"many": len(sites), "sites": list(sites), "external": list(external)}
    code = EXPORT.format(method=method, rounds=rounds, **own)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=600)
    return folder / "jobs/tls"


def models(consortium: Consortium, study: str, sites: Sequence[str] = HOSPITALS) -> list[dict[str, torch.Tensor]]:
    folders = [consortium.kit(site) / "medsilo" / study / "sites" / site for site in sites]
    return [load_tensors(folder / file)[0] for folder in folders for file in (paths.LAST, paths.BEST)]


def studies(consortium: Consortium) -> set[str]:
    return {path.parent.name for path in (consortium.kit("localhost") / "medsilo").glob(f"*/{paths.SUMMARY}")}


def is_after(study: Path, earlier: set[str]) -> bool:
    return study.name not in earlier and bool(list(study.glob("sites/*/state-2.safetensors")))


@pytest.fixture(scope="module")
def undisturbed(teaching: Consortium, tmp_path_factory: pytest.TempPathFactory) -> str:
    job = exported(Path(__file__).parents[2], tmp_path_factory.mktemp("undisturbed") / "work", "FedBN", ROUNDS)
    assert teaching.run(job) == "FINISHED:COMPLETED"
    (study,) = studies(teaching)
    return study


@pytest.mark.long
@pytest.mark.parametrize("dies", ["the hospital", "its script"])
def test_a_hospital_that_dies_and_comes_back_ends_with_the_same_tensors(
    dies: str, undisturbed: str, teaching: Consortium, root: Path, tmp_path: Path
) -> None:
    """In an earlier version, the study ended for all hospitals if the system killed a script's separate process, for
    example for lack of memory.
    """
    before = studies(teaching)
    job = exported(root, tmp_path / "work", "FedBN", ROUNDS, external=["hospital-2"] if dies == "its script" else ())
    session = teaching.session()
    try:
        job_id = session.submit_job(str(job))
        kept = teaching.kit("hospital-2") / "medsilo"
        wait_until(lambda: any(is_after(path, before) for path in kept.iterdir()), 120, "its second round")
        if dies == "its script":
            (script,) = teaching.family("hospital-2", "custom/client.py")
            script.kill()
        else:
            teaching.restart("hospital-2")
        wait_until(lambda: str(session.get_job_status(job_id)).startswith("FINISHED"), 300, "the job's end")
        assert str(session.get_job_status(job_id)) == "FINISHED:COMPLETED"
    finally:
        session.close()
    (disturbed,) = studies(teaching) - before
    summary = json.loads((teaching.kit("localhost") / "medsilo" / disturbed / paths.SUMMARY).read_text())
    assert summary["status"] == "finished" and summary["rounds"]["done"] == ROUNDS
    for one, other in zip(models(teaching, undisturbed), models(teaching, disturbed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("external", [(), ("hospital-2",)], ids=["in the job's process", "in its own process"])
def test_a_message_that_a_cut_swallowed_does_not_hold_up_the_study(
    external: Sequence[str], undisturbed: str, teaching: Consortium, root: Path, tmp_path: Path
) -> None:
    """In earlier versions, the study waited 295 s after the connection was restored, because NVFlare waits five minutes
    for a reply.
    """
    before, startup = studies(teaching), teaching.kit("hospital-2") / "startup"
    job = exported(root, tmp_path / "work", "FedBN", ROUNDS, external=external)
    shutil.copytree(startup, tmp_path / "startup")
    session, server = teaching.session(), teaching.kit("localhost") / "medsilo"
    known = {path.name for path in server.iterdir()}

    def rounds() -> int:
        (study,) = [path.parent for path in server.glob(f"*/{paths.PLAN}") if path.parent.name not in known] or [None]
        return len(Record(study).rounds()) if study else 0

    with Relay(teaching.port) as relay:
        relay.take_in(startup)
        teaching.restart("hospital-2")
        try:
            job_id = session.submit_job(str(job))
            wait_until(lambda: rounds() >= 1, 240, "the first round")
            relay.hush()
            time.sleep(3.0)
            relay.cut()
            relay.speak()
            time.sleep(5.0)
            done, back = rounds(), time.monotonic()
            assert done < ROUNDS
            relay.mend()
            wait_until(lambda: rounds() > done, 400, "the next round")
            seconds = time.monotonic() - back
            wait_until(lambda: str(session.get_job_status(job_id)).startswith("FINISHED"), 300, "the job's end")
            assert str(session.get_job_status(job_id)) == "FINISHED:COMPLETED"
        finally:
            session.close()
            shutil.copytree(tmp_path / "startup", startup, dirs_exist_ok=True)
            teaching.restart("hospital-2")
    print(f"the next round ended {seconds:.1f} s after the connection was restored")
    assert seconds < 60
    (disturbed,) = studies(teaching) - before
    summary = json.loads((server / disturbed / paths.SUMMARY).read_text())
    assert summary["rounds"]["done"] == ROUNDS and not any(own["missed"] for own in summary["sites"].values())
    for one, other in zip(models(teaching, undisturbed), models(teaching, disturbed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
