"""Faults of real processes and lines, over mutual TLS: the study goes on, and its summary says what was missed."""

import os
import shutil
import signal
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from medsilo import cli
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs.record import Record
from medsilo.runs.schema import RoundCount
from medsilo_lab.consortium import lead
from tests.conftest import SITES, make_plan
from tests.faults.test_orphans import living
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.relay import Relay
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

A, B, C = SITES
GO_ON = ["participation.when_missing=continue", "participation.minimum=1"]
both = pytest.mark.xdist_group("consortium")
alone = pytest.mark.xdist_group("pair")
pytestmark = pytest.mark.slow


def start(consortium: Consortium, folder: Path, study: str, *changes: str, sites: list[str]) -> tuple[str, Record]:
    """Submit a study; NVFlare's id for it, and what the server writes."""
    write_job(folder / study, make_plan("fedbn", *changes, sites=sites), study=study)
    job = lead.submit(folder / study, consortium.kit(LEAD), print)
    return job, Record(consortium.kit(SERVER) / "medsilo" / study)


def trainer(consortium: Consortium, site: str) -> psutil.Process:
    """The process that trains at a site."""
    wait_until(lambda: len(consortium.family(site, "medsilo.federation.process.worker")) == 1, 60, "the trainer")
    return consortium.family(site, "medsilo.federation.process.worker")[0]


def stop_in_a_round(process: psutil.Process, record: Record) -> int:
    """Stop a trainer, and wait until the server has nothing to do but to wait for it; the round that it is in."""
    process.suspend()
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 3:
        if len(record.rounds()) != seen:
            seen, since = len(record.rounds()), time.monotonic()
        time.sleep(0.1)
    return seen + 1


@pytest.mark.long
@both
def test_a_killed_and_a_hanging_trainer_cost_their_rounds(consortium: Consortium, tmp_path: Path) -> None:
    """At the strict hospital. Killed: refused at once. Hanging: lost when time is up, ended, and replaced."""
    changes = [*GO_ON, "training.rounds=24", "participation.timeout=25"]
    job, record = start(consortium, tmp_path, "fragile", *changes, sites=[A, B])
    wait_until(lambda: len(record.rounds()) >= 3, 120, "round 3")
    first = trainer(consortium, B)
    killed = stop_in_a_round(first, record)
    first.kill()
    wait_until(lambda: len(record.rounds()) >= killed + 2, 60, "two rounds more")
    second = trainer(consortium, B)
    hung = stop_in_a_round(second, record)
    assert cli.main(["status", job, "--watch", "--kit", str(consortium.kit(LEAD))]) == 0

    summary = record.summary()
    assert summary.status == "finished" and summary.rounds == RoundCount(planned=24, done=24)
    missed = summary.sites[B].missed
    assert "the training process died (SIGKILL)" in missed[killed]
    assert missed[hung] == "lost: no answer within 25 s"
    assert list(missed)[:2] == [killed, hung]  # each time it is back in the next round;
    assert set(missed) <= {killed, hung, hung + 1}  # a busy machine may need one more to begin a process
    assert summary.sites[A].missed == {} and summary.sites[B].test is not None
    assert summary.sites[B].warnings == {}
    log = (consortium.root / f"{B}.log").read_text()
    assert "training goes on in process" in log and "the training process died (SIGKILL)" in log
    wait_until(lambda: not consortium.family(B, "medsilo.federation.process.worker"), 60, "the trainers' end")
    assert not first.is_running() and not second.is_running()


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


@pytest.mark.long
@alone
def test_a_line_that_is_cut_for_twenty_seconds(pair: Consortium, tmp_path: Path) -> None:
    """Between a hospital and the server, in the middle of the study: nothing is lost, all goes on by itself."""
    plan = make_plan("fedbn", "training.rounds=40", sites=[A, B])
    inprocess.run(plan, folder=tmp_path / "loop")
    startup = pair.kit(B) / "startup"
    shutil.copytree(startup, tmp_path / "startup")
    with Relay(pair.port) as relay:
        relay.take_in(startup)
        pair.restart(B)
        try:
            job, record = start(pair, tmp_path, "cut", "training.rounds=40", sites=[A, B])
            wait_until(lambda: len(record.rounds()) >= 3, 120, "round 3")
            relay.cut()
            time.sleep(20)
            assert len(record.rounds()) < 40
            relay.mend()
            assert cli.main(["status", job, "--watch", "--kit", str(pair.kit(LEAD))]) == 0
        finally:
            shutil.copytree(tmp_path / "startup", startup, dirs_exist_ok=True)
            pair.restart(B)
    assert record.summary().sites[B].missed == {}
    assert_same_outcome(tmp_path / "loop", gathered(pair, "cut", [A, B], tmp_path / "secure"))


@pytest.mark.long  # at every change test_returning.py kills it
@alone
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_hospital_runs_ends_with_its_own_process(sign: signal.Signals, pair: Consortium, tmp_path: Path) -> None:
    """As its stop_fl.sh ends it: the job's process, and the trainer's, are gone ten seconds later."""
    changes = [*GO_ON, "training.rounds=2000", "participation.timeout=60"]
    job, record = start(pair, tmp_path, f"left-{sign.name}", *changes, sites=[A, B])
    try:
        wait_until(lambda: len(record.rounds()) >= 2, 120, "round 2")
        family = pair.family(B)
        assert len(family) >= 3 and trainer(pair, B) in family
        before = len(pair.log(B))
        pair.processes[B].send_signal(sign)
        pair.processes[B].wait(timeout=30)
        wait_until(lambda: not living(family), 10, "the end of all that it ran")
    finally:
        lead.cancel(job, pair.kit(LEAD), print)
        if pair.processes[B].poll() is not None:
            pair.start_party(B)
            pair.wait_for_log(B, "Successfully registered client", before)
