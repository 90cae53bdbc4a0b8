"""Hospitals behind a relay whose tensors one of them adds up: the server gets one mean, and the same bits follow."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.consortium import lead
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs.paths import DIARY
from medsilo.runs.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("sums")]

HOSPITALS = [*SITES, "hospital-d"]
GROUPS = {"city": HOSPITALS[:3], "rest": HOSPITALS[3:]}
CITY = f"participation.groups={{city: [{', '.join(GROUPS['city'])}], rest: [{HOSPITALS[3]}]}}"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Three hospitals behind a relay, and one that connects to the server."""
    root = tmp_path_factory.mktemp("grouped")
    grouped = Consortium(root, dict.fromkeys(HOSPITALS, "teaching-hospital"), relays={"city": GROUPS["city"]})
    try:
        grouped.start()
        yield grouped
    finally:
        grouped.stop()


def diary(grouped: Consortium, site: str, study: str) -> list[dict]:
    """Return what a hospital has noted of its answers."""
    (file,) = (grouped.kit(site) / "medsilo" / study).rglob(DIARY)
    return [line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "answered"]


def test_the_server_gets_one_mean_of_a_group_and_the_bits_are_the_same(grouped: Consortium, tmp_path: Path) -> None:
    """Orders go as differences, and so does the answer of the hospital whose tensors the server reads."""
    changes = [CITY, f"participation.sums_at={{city: {HOSPITALS[1]}}}", "transport.delta=true"]
    plan = make_plan("fedadam", *changes, sites=HOSPITALS)
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan, study="summed")
    assert grouped.run(tmp_path / "job") == "FINISHED:COMPLETED", grouped.log(SERVER)[-3000:]
    assert_same_outcome(tmp_path / "loop", gathered(grouped, "summed", HOSPITALS, tmp_path / "secure"))
    record, loop = Record(grouped.kit(SERVER) / "medsilo" / "summed"), Record(tmp_path / "loop")
    for line, whole in zip(record.rounds(), loop.rounds(), strict=True):
        assert line.answered == HOSPITALS
        read = [site for site, own in line.sites.items() if own.updates]  # the server knows where their models go
        assert read == GROUPS["rest"]
        fewer = {site for site, own in line.sites.items() if own.bytes_up < whole.sites[site].bytes_up}
        assert fewer == set(GROUPS["rest"])
        fewer = {site for site, own in line.sites.items() if own.bytes_down < whole.sites[site].bytes_down}
        assert fewer == (set() if line.round == 1 else set(HOSPITALS))
    added = [line for line in diary(grouped, HOSPITALS[1], "summed") if line["task"] == "sum"]
    assert [line["round"] for line in added] == [1, 2] and all(line["bytes"] > 0 for line in added)


def test_a_hospital_that_lets_nobody_read_what_it_sends_does_not_join(grouped: Consortium, tmp_path: Path) -> None:
    settings = grouped.kit(HOSPITALS[0]) / "local" / "medsilo.yaml"
    settings.write_text("device: cpu\nsums_at: []\n")
    plan = make_plan("fedavg", CITY, f"participation.sums_at={{city: {HOSPITALS[1]}}}", sites=HOSPITALS)
    write_job(tmp_path / "job", plan, study="unread")
    assert grouped.run(tmp_path / "job") != "FINISHED:COMPLETED"
    reason = Record(grouped.kit(SERVER) / "medsilo" / "unread").summary().reason
    assert f"{HOSPITALS[0]} refused: the plan lets {HOSPITALS[1]} read what this hospital sends" in str(reason)


def test_a_hospital_that_adds_up_and_dies_costs_its_group_the_rounds_and_nobody_else(
    grouped: Consortium, tmp_path: Path
) -> None:
    adder, (alone,) = HOSPITALS[1], GROUPS["rest"]
    changes = [CITY, f"participation.sums_at={{city: {adder}}}", "training.rounds=7"]
    changes += ["participation.when_missing=continue", "participation.minimum=1", "participation.timeout=40"]
    write_job(tmp_path / "job", make_plan("fedavg", *changes, sites=HOSPITALS), study="bereft")
    lead.submit(tmp_path / "job", grouped.kit(LEAD), print)
    record = Record(grouped.kit(SERVER) / "medsilo" / "bereft")
    wait_until(lambda: len(record.rounds()) >= 2, 120, "round 2")
    grouped.kill(adder)
    try:
        wait_until(lambda: record.finished() is not None, 400, "the study's end")
    finally:
        grouped.start_party(adder)
    whole = [set(line.answered) == set(HOSPITALS) for line in record.rounds()]
    died = whole.index(False)
    assert whole == [True] * died + [False] * (7 - died) and 2 <= died < 7
    for line in record.rounds()[died:]:
        assert line.answered == [alone]
        assert set(GROUPS["city"]) == {*line.lost, *line.refused}
    summary = record.summary()
    assert summary.sites[alone].missed == {} and summary.sites[alone].test is not None
    for site in GROUPS["city"]:
        assert adder in summary.sites[site].missed[died + 1] or site == adder
