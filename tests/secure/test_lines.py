"""Bad lines between a hospital and the server, over mutual TLS: a study ends with the undisturbed run's tensors."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medsilo.consortium import lead
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.plan import Plan
from medsilo.runs.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.relay import Line, Relay
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

A, B = SITES[:2]
VPN = Line(rate=125_000, delay=0.15, loss=0.05)  # 1 Mbit/s, 300 ms there and back, every twentieth packet lost
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.xdist_group("pair")]


@contextmanager
def through(pair: Consortium, line: Line, folder: Path) -> Iterator[Relay]:
    """The hospital B reaches the server over such a line."""
    startup = pair.kit(B) / "startup"
    shutil.copytree(startup, folder / "startup")
    with Relay(pair.port, line) as relay:
        relay.take_in(startup)
        pair.restart(B)
        try:
            yield relay
        finally:
            relay.speak()
            shutil.copytree(folder / "startup", startup, dirs_exist_ok=True)
            pair.restart(B)


def start(pair: Consortium, plan: Plan, folder: Path, study: str) -> tuple[str, Record]:
    """Run a plan undisturbed in this process, and submit it."""
    inprocess.run(plan, folder=folder / "loop")
    write_job(folder / "job", plan, study=study)
    job = lead.submit(folder / "job", pair.kit(LEAD), print)
    return job, Record(pair.kit(SERVER) / "medsilo" / study)


def check(pair: Consortium, job: str, record: Record, folder: Path) -> None:
    """Wait for the study's end: no site has missed a round, and the tensors are those of the undisturbed run."""
    wait_until(lambda: record.summary() is not None, 1200, "the study's end")
    assert ended(pair.kit(LEAD), job) == "FINISHED:COMPLETED"
    assert all(site.missed == {} for site in record.summary().sites.values())
    assert_same_outcome(folder / "loop", gathered(pair, record.folder.name, [A, B], folder / "secure"))


@pytest.mark.parametrize("closes", [False, True], ids=["silent", "closed"])
def test_a_line_that_is_down_for_six_minutes(pair: Consortium, closes: bool, tmp_path: Path) -> None:
    """With the defaults. As a VPN drops: nothing passes and nothing is closed; or with every connection closed."""
    plan = make_plan("fedbn", "training.rounds=30", "participation.timeout=600", sites=[A, B])
    with through(pair, Line(), tmp_path) as relay:
        job, record = start(pair, plan, tmp_path, f"down-{closes}")
        wait_until(lambda: len(record.rounds()) >= 3, 240, "round 3")
        relay.cut() if closes else relay.hush()
        time.sleep(360)
        assert len(record.rounds()) < 30
        relay.mend() if closes else relay.speak()
        check(pair, job, record, tmp_path)


def test_a_slow_lossy_line_from_far_away(pair: Consortium, tmp_path: Path) -> None:
    """A model of 0.8 MB, which takes 15 s each way, and is cut within."""
    changes = ["training.rounds=2", "network.hidden=4096", "participation.timeout=900"]
    plan = make_plan("fedbn", *changes, sites=[A, B])
    with through(pair, VPN, tmp_path) as relay:
        job, record = start(pair, plan, tmp_path, "far-away")
        before = relay.up.passed
        wait_until(lambda: relay.up.passed > before + 400_000, 600, "the first bytes of a model")
        relay.cut()
        time.sleep(45)
        relay.mend()
        check(pair, job, record, tmp_path)
