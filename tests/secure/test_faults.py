"""A study over mutual TLS succeeds even if a hospital has a wrong clock or a full disk."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest

from medsilo.runs import event_reading
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan, mounted
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium, wait_until
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
    """The clock is two hours wrong in all Python processes of the hospital."""
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


@contextmanager
def on_a_small_disk(pair: Consortium, hospital: str) -> Iterator[Path]:
    kit, aside = pair.kit(hospital), pair.root / f"{hospital}-aside"
    pair.end(pair.processes[hospital])
    kit.rename(aside)
    try:
        with mounted(kit, "12m"):
            try:
                shutil.copytree(aside, kit, dirs_exist_ok=True)
                before = len(pair.log(hospital))
                pair.start_party(hospital)
                pair.wait_for_log(hospital, REGISTERED, before)
                yield kit
            finally:
                pair.end(pair.processes[hospital])
                shutil.copytree(kit / "medsilo", aside / "medsilo", dirs_exist_ok=True)
    finally:
        kit.rmdir()
        aside.rename(kit)
        before = len(pair.log(hospital))
        pair.start_party(hospital)
        pair.wait_for_log(hospital, REGISTERED, before)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    over = threading.Event()

    def fill() -> None:
        with (disk / "filler").open("wb", buffering=0) as filler:
            while not over.wait(0.02):
                with suppress(OSError):
                    while filler.write(b"x" * 4096):
                        pass

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        over.set()
        filling.join()
        (disk / "filler").unlink()


@pytest.mark.long
@alone
def test_a_full_disk_at_a_hospital_pauses_the_study(pair: Consortium, tmp_path: Path) -> None:
    """The job's logs and audit files are on the full disk, and the study waits until the test frees space."""
    plan = make_plan("fedbn", "training.rounds=12", "participation.when_missing=wait", sites=[A, B])
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "full", plan, study="full")
    record = Record(pair.kit(SERVER) / "medsilo/full")
    with on_a_small_disk(pair, B) as kit:
        job = lead.submit(tmp_path / "full", pair.kit(LEAD), print)
        wait_until(lambda: len(record.rounds()) >= 3, 120, "round 3")
        with full(kit):
            time.sleep(25)
            before = len(record.rounds())
        assert ended(pair.kit(LEAD), job) == "FINISHED:COMPLETED"
        assert before < 12 and record.summary().finished
        told = [line.split("\t") for line in event_reading.read(kit, "full")]
        assert any("disk is full" in columns[6] for columns in told if columns[2] == "refused")
        at_server = [
            line.split("\t") for line in event_reading.read(pair.kit(SERVER), "full") if line.split("\t")[3] == B
        ]
        assert [columns[2] for columns in at_server] == ["refused", "back"] and "disk is full" in at_server[0][6]
        asked = (kit / job / "audit.log").read_text().splitlines()
        assert "submit result OK" in asked[-1]
    assert (record.folder / "jobs.txt").read_text().split() == [job]
    assert_same_outcome(tmp_path / "loop", gathered(pair, "full", [A, B], tmp_path / "secure"))
