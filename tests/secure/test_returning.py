"""A hospital whose processes were killed returns to the running study within seconds, over mutual TLS."""

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from medsilo import cli
from medsilo.runs import event_reading
from medsilo.runs.progress import read_now
from medsilo.runs.rounds import RequestStatus
from medsilo_lab.consortium import lead
from medsilo_lab.consortium.incidents import GATHER, SETTLED
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.faults.test_orphans import living
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium, wait_until
from tests.secure.test_resume import ended

A, B = SITES[:2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]


def start(pair: Consortium, folder: Path, study: str, *changes: str) -> tuple[str, Record]:
    write_job(folder / study, make_plan("fedbn", *changes, sites=[A, B]), study=study)
    job, record = lead.submit(folder / study, pair.kit(LEAD), print), Record(pair.kit(SERVER) / "medsilo" / study)
    wait_until(lambda: len(record.rounds()) >= 3, 600, "round 3")
    return job, record


def die(pair: Consortium, site: str, by: signal.Signals = signal.SIGKILL) -> float:
    """Kill a hospital's NVFlare process, which ends the job's processes and the trainer; return the kill's time."""
    family = pair.family(site)
    assert len(family) >= 3 and pair.family(site, "medsilo.federation.process.worker")
    pair.processes[site].send_signal(by)
    pair.processes[site].wait(30)
    died = time.monotonic()
    wait_until(lambda: not living(family), 10, "the end of all that it ran")
    return died


def back(pair: Consortium, site: str) -> float:
    before = len(pair.log(site))
    pair.start_party(site)
    pair.wait_for_log(site, REGISTERED, before)
    return time.monotonic()


def kinds(pair: Consortium, party: str) -> list[str]:
    return [line.split("\t")[2] for line in event_reading.read(pair.kit(party), "seconds")]


@pytest.mark.long
def test_a_dead_hospital_costs_seconds_and_is_taken_in_when_it_is_back(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def status() -> tuple[int, dict]:
        capsys.readouterr()
        code = cli.main(["status", "--kit", str(pair.kit(LEAD)), "--require", f"{A},{B}", "--json"])
        told = json.loads(capsys.readouterr().out)
        return code, {hospital["name"]: hospital for hospital in told["hospitals"]}

    changes = ["participation.when_missing=continue", "participation.minimum=1", "training.rounds=4000"]
    job, record = start(pair, tmp_path, "seconds", *changes, "participation.timeout=300")
    try:
        code, hospitals = status()
        assert code == 0 and all("seconds: round" in hospitals[site]["doing"][0] for site in (A, B))
        died = die(pair, B)
        wait_until(lambda: record.rounds()[-1].answered == [A], 30, "a round without it")
        alone = time.monotonic() - died
        wait_until(lambda: "its connection was closed" in status()[1][B]["doing"][0], 30, "the reason")
        code, hospitals = status()
        assert code == 1 and [hospitals[site]["connected"] for site in (A, B)] == [True, False]
        assert hospitals[B]["last_heard"] > time.time() - 60
        returned = back(pair, B)
        wait_until(lambda: B in record.rounds()[-1].answered, 90, "its first answer")
        taken_in = time.monotonic() - returned
        code, hospitals = status()
        assert code == 0 and "closed" not in hospitals[B]["doing"][0]
        missed = next(line.lost[B] for line in record.rounds() if B in line.lost)
        die(pair, B, signal.SIGTERM)  # a service manager stops a hospital with SIGTERM
        wait_until(lambda: record.rounds()[-1].answered == [A], 30, "a round without it")
    finally:
        lead.cancel(job, pair.kit(LEAD), print)
        if pair.processes[B].poll() is not None:
            pair.start_party(B)
    with capsys.disabled():
        print(f"next round {alone:.1f} s after its death; first answer {taken_in:.1f} s after its return; {missed}")
    # time limits on a loaded machine; on an idle machine, limits of 10 s and 60 s would be enough
    assert alone < 25 and taken_in < 85
    assert "connection" in missed
    assert ended(pair.kit(LEAD), job, within=60) == "FINISHED:ABORTED"
    told = [line.split("\t") for line in event_reading.read(pair.kit(SERVER))]
    of_server, of_study = (
        {what for _, _, what, who, study, *_ in told if who == B and study == own} for own in ("-", "seconds")
    )
    assert {"joined", "back"} <= of_server and {"away", "back"} <= of_study
    of_job = {line.split("\t")[2] for line in event_reading.read(pair.kit(SERVER), job)}
    assert {"began", "away", "back"} <= of_job and of_job & {"ended", "failed"}
    (first, *_), at_a, at_b = (event_reading.read(pair.kit(B)), *(kinds(pair, site) for site in (A, B)))
    assert first.split("\t")[2:4] == ["joined", "the server"]
    assert at_a == ["began", "ended"]
    # When its parent process dies, a job process ends by itself; the log may lack the last line of the job process.
    assert at_b[0] == "began" and at_b[1] in ("ended", "failed") and at_b[2] == "resumed"


def _a_second_registered(pair: Consortium) -> bool:
    first, before = pair.processes[B], len(pair.log(B))
    second = pair.start_party(B)
    try:
        wait_until(lambda: REGISTERED in pair.log(B)[before:] or second.poll() is not None, 60, "the second's start")
        return REGISTERED in pair.log(B)[before:]
    finally:
        second.kill()
        second.wait(30)
        pair.processes[B] = first


@pytest.mark.long
def test_a_kit_that_was_started_twice_works_again_when_its_second_process_has_died(pair: Consortium) -> None:
    """NVFlare's own preflight check starts a second process of a running kit."""

    def required() -> int:
        return cli.main(["status", "--kit", str(pair.kit(LEAD)), "--require", f"{A},{B}"])

    wait_until(lambda: required() == 0, 60, "both, whatever the test before did")
    assert any(_a_second_registered(pair) for _ in range(5))

    def told() -> list[tuple[str, str]]:
        lines = [line.split("\t") for line in event_reading.read(pair.kit(SERVER))]
        return [(line[2], line[6]) for line in lines if line[3] == B]

    wait_until(lambda: told()[-1] == ("away", "it was silent for 90 s"), 120, "the server's word of it")
    wait_until(lambda: required() == 1, 15, "what status says")
    wait_until(lambda: told()[-1][0] == "back", 30, "its first process")
    assert required() == 0


@pytest.mark.parametrize(("stands", "tells", "who"), [(B, SERVER, B), (SERVER, B, "the server")])
def test_who_stands_still_is_away_before_half_a_minute_is_over(
    stands: str, tells: str, who: str, pair: Consortium
) -> None:
    """The watch waits some seconds before sending a message, because further problems may follow."""

    def told() -> list[str]:
        return [line.split("\t")[2] for line in event_reading.read(pair.kit(tells)) if line.split("\t")[3] == who]

    wait_until(lambda: bool(told()) and told()[-1] in ("joined", "back"), 600, "both, whatever was before")
    before = len(list(event_reading.read(pair.kit(stands))))
    family = pair.family(stands)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        wait_until(lambda: told()[-1] == "away", 30 - GATHER - 1, "the word of it")
    finally:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()
    wait_until(lambda: told()[-1] == "back", 30 - SETTLED - 1, "its return")
    assert not [line for line in list(event_reading.read(pair.kit(stands)))[before:] if "silent" in line]


@pytest.mark.parametrize(
    ("process", "tells"), [("client.worker_process", "away"), ("medsilo.federation.process.worker", "refused")]
)
def test_a_process_that_died_at_a_hospital_is_told_at_the_server(
    process: str, tells: str, pair: Consortium, tmp_path: Path
) -> None:
    changes = ["participation.when_missing=wait", "training.rounds=4000"]
    job, record = start(pair, tmp_path, f"dead-{tells}", *changes)
    try:

        def told() -> list[str]:
            lines = (line.split("\t") for line in event_reading.read(pair.kit(SERVER), record.folder.name))
            return [columns[2] for columns in lines if columns[3] == B and columns[2] != "slow"]

        def asks() -> int:
            turns = read_now(RequestStatus, record.folder)
            return turns.round if turns and turns.task == "round" else 0

        # The process must die during a round, so the test stops the process until the study waits for an answer, and
        # then kills the process.
        stopped = pair.family(B, process)
        for member in stopped:
            member.suspend()
        last, since = asks(), time.monotonic()
        until = since + 600
        while not last or time.monotonic() < since + 5:
            assert time.monotonic() < until, "the study does not wait"
            time.sleep(0.1)
            if (now := asks()) != last:
                last, since = now, time.monotonic()
        for member in stopped:
            member.kill()
        wait_until(lambda: told() == [tells, "back"], 600, "both words of it")
        rounds = len(record.rounds())
        wait_until(lambda: B in record.rounds()[-1].answered and len(record.rounds()) > rounds + 2, 600, "its answers")
        assert told() == [tells, "back"]
    finally:
        lead.cancel(job, pair.kit(LEAD), print)
