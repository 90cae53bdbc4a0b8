"""Run studies with secure aggregation over mutual TLS; hospitals sign their keys with their kits' certificates."""

from pathlib import Path

import pytest
import torch

from medsilo.core.files import load_tensors
from medsilo.runs.reading import read_summary
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import Consortium
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]


def test_sealed_over_tls_equals_the_loop(consortium: Consortium, tmp_path: Path) -> None:
    plan = make_plan("fedavg", "secure_aggregation.mode=pairwise")
    inprocess.run(plan, folder=tmp_path / "loop")
    study = "sealed-pairwise"
    write_job(tmp_path / "plain", plan, study=study)
    job = tmp_path / "job"
    write_job(job, plan, tmp_path / "plain")
    assert consortium.run(job) == "FINISHED:COMPLETED"
    run = gathered(consortium, study, SITES, tmp_path / "secure")
    for site in SITES:
        for name in ("best", "last"):
            mine, theirs = (
                load_tensors(folder / "sites" / site / f"{name}.safetensors")[0] for folder in (tmp_path / "loop", run)
            )
            assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items())
    told = read_summary(run).details.secure_aggregation
    assert told and told.mode == "pairwise" and told.keys.startswith("certificates")
    assert read_summary(tmp_path / "loop").details.secure_aggregation.keys.startswith("no signature")  # type: ignore[union-attr]
