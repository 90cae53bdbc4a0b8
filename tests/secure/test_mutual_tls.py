"""A job over mutual TLS between real server and hospital processes: the same numbers as the plain loop."""

import shutil
from pathlib import Path

import pytest

from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs.reading import read_summary
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import SERVER, Consortium

of_three = pytest.mark.xdist_group("consortium")  # one federation serves them all
TEACHING = [SITES[0], SITES[2]]


def gathered(consortium: Consortium, study: str, sites: list[str], folder: Path) -> Path:
    """Every party's results in one run tree."""
    shutil.copytree(consortium.kit(SERVER) / "medsilo" / study, folder)
    for site in sites:
        shutil.copytree(consortium.kit(site) / "medsilo" / study / "sites" / site, folder / "sites" / site)
    return folder


def run_both_ways(consortium: Consortium, method: str, sites: list[str], folder: Path) -> None:
    plan = make_plan(method, sites=sites)
    inprocess.run(plan, folder=folder / "loop")
    study = f"secure-{method}"
    write_job(folder / "plain", plan, study=study)
    job = folder / "job"
    write_job(job, plan, folder / "plain")  # as it is submitted
    assert consortium.run(job) == "FINISHED:COMPLETED"
    assert_same_outcome(folder / "loop", gathered(consortium, study, sites, folder / "secure"))


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.xdist_group("pair")
def test_over_tls_equals_the_loop(pair: Consortium, tmp_path: Path) -> None:
    """A strict hospital takes part in the installed way and sends models only."""
    run_both_ways(pair, "fedbn", SITES[:2], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", ["adafed", "fedsm"])
@of_three
def test_all_else_over_tls_equals_the_loop(consortium: Consortium, method: str, tmp_path: Path) -> None:
    """Teaching hospitals send all else, too. At every change a study of test_lead.py shows it of FedSM."""
    run_both_ways(consortium, method, TEACHING, tmp_path)


@pytest.mark.long
@pytest.mark.slow
@of_three
def test_a_failed_study_is_no_success_for_nvflare_either(consortium: Consortium, tmp_path: Path) -> None:
    plan = make_plan("fedavg", "training.learning_rate=1000", "training.momentum=0.99")
    write_job(tmp_path / "job", plan, study="diverging")
    status = consortium.run(tmp_path / "job")
    assert status != "FINISHED:COMPLETED" and status.startswith("FINISHED")
    summary = read_summary(consortium.kit(SERVER) / "medsilo" / "diverging")
    assert summary.status == "failed" and "diverged" in summary.reason
