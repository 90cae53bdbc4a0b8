"""After processes of a federation over mutual TLS were killed, a study continues with the numbers of an undisturbed
run.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from medsilo import cli
from medsilo.plan import Plan
from medsilo.runs import event_reading
from medsilo.runs.reading import read_summary
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan, pace
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium, wait_until
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
TWO = SITES[:2]
OF_JOB = "client.worker_process"


def ended(kit: Path, job: str, within: float = 600) -> str:
    def over() -> bool:
        with lead.connected(kit) as session:
            return str(session.get_job_status(job)).startswith("FINISHED")

    try:
        wait_until(over, within, f"the end of {job}", every=1.0)  # each check logs in to the server
    except AssertionError as error:
        raise AssertionError(f"{error}: {' / '.join(lead.status(kit, job).lines())}") from None
    return status_of(kit, job)


def status_of(kit: Path, job: str) -> str:
    return lead.status(kit, job).jobs[0].status


def prepared(pair: Consortium, plan: Plan, tmp_path: Path, study: str) -> tuple[Record, Callable[[int], None]]:
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan, study=study)
    record = Record(pair.kit(SERVER) / "medsilo" / study)

    def until_round(number: int) -> None:
        wait_until(lambda: len(record.rounds()) >= number, 240, f"round {number}")

    return record, until_round


@pytest.mark.long
def test_killed_servers_cost_no_finished_round(pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = make_plan("fedbn", "training.rounds=40", "participation.timeout=30", sites=TWO)
    record, until_round = prepared(pair, plan, tmp_path, "often-killed")
    kit = pair.kit(LEAD)

    def resume(job: str | Path) -> str:
        capsys.readouterr()
        assert cli.main(["resume", str(job), "--kit", str(kit)]) == 0
        new = capsys.readouterr().out.strip()
        assert status_of(kit, new) in ("RUNNING", "FINISHED:COMPLETED")
        return new

    first = lead.submit(tmp_path / "job", kit, print)
    until_round(3)
    assert cli.main(["resume", first, "--kit", str(kit)]) == 1
    assert f"job {first} is RUNNING; 'medsilo cancel {first}' ends it first" in capsys.readouterr().err
    (process,) = pair.family(SERVER, "runner_process")
    process.kill()
    assert ended(kit, first) in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    capsys.readouterr()
    assert cli.main(["status", first, "--watch", "--kit", str(kit)]) == 1
    # the server reports the reason, because no process of the job is alive
    assert "process" in capsys.readouterr().out.splitlines()[-3]
    done = record.load_checkpoint()[1]["round"]
    assert 3 <= done < 40
    second = resume(first)
    until_round(done + 4)

    # The server's machine dies and restarts, and the hospitals end the jobs that the server has lost.
    pair.kill(SERVER)
    pair.start_party(SERVER)
    pair.await_hospitals()
    assert ended(kit, second) == "FINISHED:ABNORMAL"
    done = record.load_checkpoint()[1]["round"]
    third = resume(second)
    until_round(done + 4)

    pair.kill(TWO[1])
    assert ended(kit, third) == "FINISHED:EXECUTION_EXCEPTION"
    before = len(pair.log(TWO[1]))
    pair.start_party(TWO[1])
    pair.wait_for_log(TWO[1], REGISTERED, before)
    summary = record.summary()
    assert summary.status == "failed" and f"{TWO[1]} lost:" in summary.reason
    assert cli.main(["status", third, "--watch", "--kit", str(kit)]) == 1
    watched = capsys.readouterr().out
    assert f"medsilo resume {third}" in watched and summary.reason in watched
    fourth = resume(lead.download(third, kit, tmp_path / "runs"))
    assert ended(kit, fourth) == "FINISHED:COMPLETED"

    assert [line.round for line in record.rounds()] == list(range(1, 41))
    assert_same_outcome(tmp_path / "loop", gathered(pair, "often-killed", TWO, tmp_path / "secure"))
    assert (record.folder / "jobs.txt").read_text().split() == [first, second, third, fourth]
    assert all(site.warnings == {} for site in record.summary().sites.values())
    capsys.readouterr()
    # --watch also follows the jobs that resume the study
    assert cli.main(["status", first, "--watch", "--kit", str(kit)]) == 0
    assert fourth in capsys.readouterr().out
    assert cli.main(["resume", fourth, "--kit", str(kit)]) == 1
    assert "is finished; there is nothing to resume" in capsys.readouterr().err
    assert read_summary(record.folder).status == "finished"


def start_slowly(pair: Consortium, hospital: str) -> None:
    """Suspend the process of a hospital's next job for 15 seconds; within this time, the server's job could end."""
    wait_until(lambda: bool(pair.family(hospital, OF_JOB)), 120, "the job's process", every=0.05)
    (process,) = pair.family(hospital, OF_JOB)
    process.suspend()
    time.sleep(15)
    process.resume()


@pytest.mark.long
def test_a_study_that_was_finished_when_its_job_died_is_not_trained_again(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_job(tmp_path / "job", make_plan("fedbn", "training.rounds=30", sites=TWO[:1]))
    kit, studies = pair.kit(LEAD), pair.kit(SERVER) / "medsilo"
    known = set(studies.glob("*"))
    job = lead.submit(tmp_path / "job", kit, print)
    (process,) = pair.family(SERVER, "runner_process")
    (folder,) = set(studies.glob("*")) - known
    wait_until((folder / "summary.json").exists, 120, "the study's end", every=0.002)
    process.kill()
    assert ended(kit, job) in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    capsys.readouterr()
    wait_until(lambda: not pair.family(TWO[0], OF_JOB), 120, "the end of the first job's process")
    late = threading.Thread(target=start_slowly, args=(pair, TWO[0]))
    late.start()
    assert cli.main(["resume", job, "--kit", str(kit)]) == 0
    late.join()
    new = capsys.readouterr().out.strip()
    assert ended(kit, new) == "FINISHED:COMPLETED"
    assert set(studies.glob("*")) - known == {folder}
    fetched = lead.download(new, kit, tmp_path / "runs")
    assert fetched.name == folder.name and len(Record(fetched).rounds()) == 30
    assert read_summary(fetched) == read_summary(folder)


def test_a_kit_s_own_process_starts_without_torch(pair: Consortium) -> None:
    """The process of a kit does not import torch, which halves the process's memory and processor time; only the
    processes of jobs need torch.
    """
    pair.restart(TWO[0])
    for party, program in {SERVER: "server_train", TWO[0]: "client_train"}.items():
        (process,) = [one for one in pair.family(party) if any(program in word for word in one.cmdline())]
        assert not any("libtorch" in file.path for file in process.memory_maps())


def lines_of(pair: Consortium, study: str) -> list[tuple[str, str, str]]:
    read = [line.split("\t") for line in event_reading.read(pair.kit(SERVER), study)]
    return [(columns[1], columns[2], columns[6]) for columns in read]


@pytest.mark.long
def test_a_study_goes_on_by_itself_when_its_job_and_its_server_died(pair: Consortium, tmp_path: Path) -> None:
    plan = make_plan("fedbn", "training.rounds=30", "participation.resume=3", sites=TWO)
    record, until_round = prepared(pair, plan, tmp_path, "by-itself")
    kit = pair.kit(LEAD)
    first = lead.submit(tmp_path / "job", kit, print)
    heard, seen = list[int](), list[tuple[str, str]]()
    watching = threading.Thread(
        target=lambda: seen.append(lead.watch(first, kit, lambda line, study: heard.append(line.round), print))
    )
    watching.start()
    until_round(3)
    (process,) = pair.family(SERVER, "runner_process")
    process.kill()
    assert ended(kit, first) in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    until_round(record.load_checkpoint()[1]["round"] + 4)
    pair.kill(SERVER)
    pair.start_party(SERVER)
    wait_until(lambda: bool(record.finished()), 240, "the study's end")
    assert [line.round for line in record.rounds()] == list(range(1, 31))
    jobs = (record.folder / "jobs.txt").read_text().split()
    assert len(jobs) == 3 and ended(kit, jobs[-1]) == "FINISHED:COMPLETED"
    watching.join(60)
    assert seen == [(jobs[-1], "FINISHED:COMPLETED")] and heard == list(range(1, 31))
    assert_same_outcome(tmp_path / "loop", gathered(pair, "by-itself", TWO, tmp_path / "secure"))
    assert lead.download(jobs[-1], kit, tmp_path / "runs").name == "by-itself"
    told = lines_of(pair, "by-itself")
    assert [what for _, what, _ in told if what != "away" and what != "back"] == [
        *("began", "failed", "resumed", "failed", "resumed", "ended")
    ]
    assert "1 of 3" in told[1][2] and "2 of 3" in [text for _, what, text in told if what == "failed"][1]
    assert all(level == "INFO" for level, what, _ in told if what == "failed")


@pytest.mark.long
def test_hospitals_are_back_at_once_when_their_killed_server_is(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The server is killed three times in one study, and stays away for three different durations."""
    plan = make_plan("fedbn", "training.rounds=60", "participation.resume=30", sites=TWO)
    record, until_round = prepared(pair, plan, tmp_path, "killed-thrice")
    lead.submit(tmp_path / "job", pair.kit(LEAD), print)
    back, on = list[float](), list[float]()
    for off in (4.0, 9.0, 16.0):
        # successful rounds reset the pause between two attempts to resume the study
        until_round(len(record.rounds()) + 11)
        pair.kill(SERVER)
        time.sleep(off)
        before, joined, done = len(pair.log(SERVER)), joins(pair), len(record.rounds())
        began = time.monotonic()
        pair.start_party(SERVER)
        pair.wait_for_log(SERVER, "Server started", before)
        at = time.monotonic()
        wait_until(lambda joined=joined: joins(pair) == joined + len(TWO), 60, "hospitals")
        back.append(time.monotonic() - at)
        until_round(done + 1)
        on.append(time.monotonic() - began)
    with capsys.disabled():
        print(f"\nhospitals back after {shown(back)}, rounds go on after {shown(on)} from the start of the server")
    wait_until(lambda: bool(record.finished()), 240, "the study's end")
    assert_same_outcome(tmp_path / "loop", gathered(pair, "killed-thrice", TWO, tmp_path / "secure"))
    assert max(back) < 7 * pace() and max(on) < 60


def joins(pair: Consortium) -> int:
    return sum("\tjoined\t" in line for line in event_reading.read(pair.kit(SERVER)))


def shown(seconds: list[float]) -> str:
    return f"{median(seconds):.0f} s (at most {max(seconds):.0f} s)"


@pytest.mark.long
def test_resuming_says_that_no_hospital_joined(pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_job(tmp_path / "job", make_plan("fedbn", "training.rounds=500", sites=TWO), study="nobody-joins")
    kit = pair.kit(LEAD)
    job = lead.submit(tmp_path / "job", kit, print)
    assert lead.cancel(job, kit, print) == "FINISHED:ABORTED"
    settings = [pair.kit(site) / "local/medsilo.yaml" for site in TWO]
    before = [path.read_text() for path in settings]
    try:
        for path in settings:
            path.write_text("device: cuda:7\n")
        capsys.readouterr()
        assert cli.main(["resume", job, "--kit", str(kit)]) == 1
        out, err = capsys.readouterr()
    finally:
        for path, text in zip(settings, before, strict=True):
            path.write_text(text)
    assert out == "" and len(err.splitlines()) == 1
    assert "0 of 2 sites answered" in err and all(site in err for site in TWO)


@pytest.mark.long
def test_a_job_that_is_cancelled_while_it_starts_does_not_run(pair: Consortium, tmp_path: Path) -> None:
    """NVFlare itself reports a cancelled job as aborted, and then runs the job to its end."""
    write_job(tmp_path / "job", make_plan("fedavg", "training.rounds=2000", sites=TWO[:1]), study="cancelled")
    folder, record = pair.kit(TWO[0]), Record(pair.kit(SERVER) / "medsilo/cancelled")
    with lead.connected(pair.kit(LEAD)) as session:
        job = session.submit_job(str(tmp_path / "job"))
        wait_until((folder / job).exists, 60, "its files at the hospital", every=0.002)
        assert session.get_job_meta(job)["status"] in ("SUBMITTED", "DISPATCHED")
        assert lead.cancel_in(session, job) == "FINISHED:ABORTED"
        time.sleep(15)
        rounds = len(record.rounds()) if record.folder.exists() else 0
        assert not any(job in word for process in pair.family(SERVER) for word in process.cmdline())
        assert str(session.get_job_status(job)) == "FINISHED:ABORTED"
    time.sleep(2)
    assert (len(record.rounds()) if record.folder.exists() else 0) == rounds < 2000


@pytest.mark.long
def test_a_study_that_waits_to_go_on_can_be_cancelled(pair: Consortium, tmp_path: Path) -> None:
    plan = make_plan("fedavg", "training.rounds=2000", "participation.resume=2", sites=TWO[:1])
    write_job(tmp_path / "job", plan, study="waits-and-ends")
    kit, record = pair.kit(LEAD), Record(pair.kit(SERVER) / "medsilo/waits-and-ends")
    job = lead.submit(tmp_path / "job", kit, print)
    wait_until(lambda: len(record.rounds()) >= 2, 120, "round 2")
    pair.family(SERVER, "runner_process")[0].kill()
    wait_until(lambda: "goes on in" in lead.status(kit, job).jobs[0].goes_on, 60, "a study that is to go on")
    assert lead.cancel(job, kit, print) == "FINISHED:ABORTED"
    time.sleep(20)
    state = lead.status(kit, job).jobs[0]
    assert (state.status, state.goes_on) == ("FINISHED:ABORTED", "")
    assert (record.folder / "jobs.txt").read_text().split() == [job]
    words = [line for line in event_reading.read(pair.kit(SERVER), job) if "\tended\t" in line]
    assert words and "cancelled it while it waited to go on" in words[-1]
