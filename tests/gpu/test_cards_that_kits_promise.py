"""Hospitals over mutual TLS promise a GPU in their settings, and jobs request fractions of the GPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from medsilo.core.files import load_tensors
from medsilo.runs.paths import GLOBAL, LAST, PROVENANCE
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import SERVER, Consortium, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine shows none"),
]
CARD = 40  # GiB of GPU memory that each hospital promises
# one hospital trains in the job's process, and the other hospital in a separate process
POLICIES = {SITES[0]: "teaching-hospital", SITES[1]: "strict-hospital"}


class WithCards(Consortium):
    def _settle(self, hospital: str) -> None:
        local = self.kit(hospital) / "local"
        (local / "medsilo.yaml").write_text("device: auto\n")
        resources = json.loads((local / "resources.json").read_text())
        resources["components"][0]["args"] |= {"num_of_gpus": 1, "mem_per_gpu_in_GiB": CARD}
        (local / "resources.json").write_text(json.dumps(resources))


@pytest.fixture
def consortium(tmp_path: Path) -> Iterator[Consortium]:
    consortium = WithCards(tmp_path, POLICIES)
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def test_two_studies_share_a_card_and_a_third_waits_for_it(consortium: Consortium, tmp_path: Path) -> None:
    def started() -> bool:
        return all(str(session.get_job_status(each)) != "SUBMITTED" for each in shared)

    def job(name: str, memory: int) -> str:
        plan = make_plan("fedavg", "training.rounds=20", sites=list(POLICIES))
        write_job(tmp_path / name, plan, study=name)
        meta = json.loads((tmp_path / name / "meta.json").read_text())
        asked = {"num_of_gpus": 1, "mem_per_gpu_in_GiB": memory}
        meta["resource_spec"] = dict.fromkeys(POLICIES, asked)
        (tmp_path / name / "meta.json").write_text(json.dumps(meta))
        return str(tmp_path / name)

    session = consortium.session()
    try:
        shared = [session.submit_job(job(name, CARD // 2)) for name in ("one", "other")]
        wait_until(
            lambda: all(str(session.get_job_status(each)) != "SUBMITTED" for each in shared), 60, "both to start"
        )
        third = session.submit_job(job("third", CARD))
        wait_until(lambda: bool(session.get_job_meta(third).get("schedule_history")), 60, "the scheduler")
        assert "not enough sites have enough resources" in session.get_job_meta(third)["schedule_history"][0]
        for each in [*shared, third]:
            wait_until(lambda each=each: "FINISHED" in str(session.get_job_status(each)), 240, "the end")
            assert str(session.get_job_status(each)) == "FINISHED:COMPLETED"
    finally:
        session.close()
    models = [load_tensors(consortium.kit(SERVER) / "medsilo" / each / GLOBAL / LAST)[0] for each in ("one", "other")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    for site in POLICIES:
        told = [json.loads(file.read_text()) for file in consortium.kit(site).glob(f"medsilo/*/**/{PROVENANCE}")]
        assert len(told) == 3 and all(each["device"].startswith("cuda") for each in told)
