"""A wrong clock at a hospital, over mutual TLS: the study is as any other."""

import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo_lab.consortium import lead
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, Consortium
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

A, B, _ = SITES
alone = pytest.mark.xdist_group("pair")
pytestmark = pytest.mark.slow


SKEW = """
import time

real = time.time
time.time = lambda: real() + 7200
"""


@pytest.mark.long
@alone
def test_a_hospital_whose_clock_is_wrong(pair: Consortium, tmp_path: Path) -> None:
    """By two hours, in all its Python processes."""
    plan = make_plan("fedbn", sites=[A, B])
    inprocess.run(plan, folder=tmp_path / "loop")
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    path = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    pair.restart(B, PYTHONPATH=os.pathsep.join(path))
    try:
        write_job(tmp_path / "skewed", plan, study="skewed")
        job = lead.submit(tmp_path / "skewed", pair.kit(LEAD), print)
        assert ended(pair.kit(LEAD), job) == "FINISHED:COMPLETED"
        told = (pair.kit(B) / "log.txt").read_text().splitlines()[-1][:19]
        assert abs(datetime.fromisoformat(told).timestamp() - time.time()) > 3600
    finally:
        pair.restart(B)
    assert_same_outcome(tmp_path / "loop", gathered(pair, "skewed", [A, B], tmp_path / "secure"))
