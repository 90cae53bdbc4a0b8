"""A job over mutual TLS between real server and hospital processes gives the same numbers as one process."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import SERVER, Consortium

of_three = pytest.mark.xdist_group("consortium")
TEACHING = [SITES[0], SITES[2]]


def gathered(consortium: Consortium, study: str, sites: list[str], folder: Path) -> Path:
    shutil.copytree(consortium.kit(SERVER) / "medsilo" / study, folder)
    for site in sites:
        shutil.copytree(consortium.kit(site) / "medsilo" / study / "sites" / site, folder / "sites" / site)
    return folder


def run_both_ways(
    consortium: Consortium, methods: Sequence[str], sites: list[str], folder: Path, *changes: str
) -> None:
    for method in methods:
        plan = make_plan(method, *changes, sites=sites)
        inprocess.run(plan, folder=folder / method / "loop")
        write_job(folder / method / "plain", plan, study=f"secure-{method}")
        write_job(folder / method / "job", plan, folder / method / "plain")
    states = consortium.run_at_once([folder / method / "job" for method in methods])
    assert states == ["FINISHED:COMPLETED"] * len(methods)
    results = [gathered(consortium, f"secure-{method}", sites, folder / method / "secure") for method in methods]
    for method, result in zip(methods, results, strict=True):
        assert_same_outcome(folder / method / "loop", result)
    began, ended = ([(run / name).stat().st_mtime for run in results] for name in (paths.PLAN, paths.SUMMARY))
    assert max(began) < min(ended)


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.xdist_group("pair")
def test_over_tls_equals_the_loop(pair: Consortium, tmp_path: Path) -> None:
    """A strict hospital, which has the default settings, takes part in two simultaneous studies, and sends only
    models.
    """
    run_both_ways(pair, ["fedbn", "fedprox"], SITES[:2], tmp_path, "training.rounds=12")


@pytest.mark.long
@of_three
def test_all_else_over_tls_equals_the_loop(consortium: Consortium, tmp_path: Path) -> None:
    """Teaching hospitals send all optional numbers in addition to models."""
    run_both_ways(consortium, ["adafed", "fedsm"], TEACHING, tmp_path)


@pytest.mark.long
@pytest.mark.xdist_group("relays")
def test_fedmap_over_tls_equals_the_loop(relayed: Consortium, tmp_path: Path) -> None:
    run_both_ways(relayed, ["fedmap"], SITES, tmp_path)


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
