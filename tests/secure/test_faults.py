"""Faults of real processes and lines, over mutual TLS: the study goes on, and its summary says what was missed."""

import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

A, B, C = SITES
both = pytest.mark.xdist_group("consortium")
alone = pytest.mark.xdist_group("pair")
pytestmark = pytest.mark.slow


def start(consortium: Consortium, folder: Path, study: str, *changes: str, sites: list[str]) -> tuple[str, Record]:
    """Submit a study; NVFlare's id for it, and what the server writes."""
    write_job(folder / study, make_plan("fedbn", *changes, sites=sites), study=study)
    job = lead.submit(folder / study, consortium.kit(LEAD), print)
    return job, Record(consortium.kit(SERVER) / "medsilo" / study)


@pytest.mark.long
@both
def test_two_jobs_at_once(consortium: Consortium, tmp_path: Path) -> None:
    """At the same hospitals, with the same package: each as if it were alone."""
    jobs = {}
    session = consortium.session()
    for study, seed in (("one", 0), ("other", 1)):
        plan = make_plan("fedbn", f"seed={seed}", sites=[A, C])
        inprocess.run(plan, folder=tmp_path / f"loop-{study}")
        write_job(tmp_path / study, plan, study=study)
        jobs[study] = session.submit_job(str(tmp_path / study))
    session.close()
    for study, job in jobs.items():
        assert ended(consortium.kit(LEAD), job) == "FINISHED:COMPLETED"
        outcome = gathered(consortium, study, [A, C], tmp_path / f"secure-{study}")
        assert_same_outcome(tmp_path / f"loop-{study}", outcome)
    spans = [Record(consortium.kit(SERVER) / "medsilo" / study).summary() for study in jobs]
    assert spans[1].started <= spans[0].ended


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
        job, _ = start(pair, tmp_path, "skewed", sites=[A, B])
        assert ended(pair.kit(LEAD), job) == "FINISHED:COMPLETED"
        told = (pair.kit(B) / "log.txt").read_text().splitlines()[-1][:19]
        assert abs(datetime.fromisoformat(told).timestamp() - time.time()) > 3600
    finally:
        pair.restart(B)
    assert_same_outcome(tmp_path / "loop", gathered(pair, "skewed", [A, B], tmp_path / "secure"))
