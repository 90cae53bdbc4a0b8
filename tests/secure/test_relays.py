"""Over mutual TLS, studies with and without relays give the same numbers, and a relay's failure only costs time."""

from pathlib import Path

import pytest

from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("relays")]


@pytest.mark.long
def test_a_study_with_personal_rows_is_the_same_behind_relays(relayed: Consortium, whole: Path, tmp_path: Path) -> None:
    inprocess.run(make_plan("ditto"), folder=tmp_path / "loop")
    assert_same_outcome(tmp_path / "loop", whole)
    for site in SITES[:2]:
        links = [link for process in relayed.family(site) for link in process.net_connections("tcp")]
        assert links and not any(link.raddr and link.raddr.port == relayed.port for link in links)


@pytest.mark.long
def test_a_relay_that_dies_and_comes_back_costs_time_only(relayed: Consortium, tmp_path: Path) -> None:
    """Messages in transit at the failed relay are lost, and the senders repeat the messages."""
    plan = make_plan("ditto", "training.rounds=60", "participation.timeout=900")
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan, study="cut-off")
    session = relayed.session()
    job = session.submit_job(str(tmp_path / "job"))
    session.close()
    record = Record(relayed.kit(SERVER) / "medsilo" / "cut-off")
    wait_until(lambda: len(record.rounds()) >= 3, 300, "round 3")
    relayed.kill("city")
    assert len(record.rounds()) < plan.rounds
    relayed.start_party("city")
    assert ended(relayed.kit(LEAD), job, 1200) == "FINISHED:COMPLETED"
    assert all(site.missed == {} for site in record.summary().sites.values())
    assert_same_outcome(tmp_path / "loop", gathered(relayed, "cut-off", SITES, tmp_path / "secure"))
