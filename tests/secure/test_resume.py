"""A study goes on after real processes were killed: over mutual TLS, with the numbers of an undisturbed run."""

import threading
import time
from pathlib import Path

import pytest

from medsilo import cli
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs.reading import read_summary
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium, wait_until
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
TWO = SITES[:2]
OF_JOB = "client.worker_process"  # in the command line of a hospital's process of a job


def ended(kit: Path, job: str, within: float = 240) -> str:
    """Wait for a job's end; its status."""

    def over() -> bool:
        with lead.connected(kit) as session:
            return str(session.get_job_status(job)).startswith("FINISHED")

    try:
        wait_until(over, within, f"the end of {job}", every=1.0)  # each look is a login
    except AssertionError as error:
        raise AssertionError(f"{error}: {' / '.join(lead.status(kit, job).lines())}") from None
    return status_of(kit, job)


def status_of(kit: Path, job: str) -> str:
    return lead.status(kit, job).jobs[0].status


@pytest.mark.long
def test_killed_servers_cost_no_finished_round(pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = make_plan("fedbn", "training.rounds=40", "participation.timeout=30", sites=TWO)
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan, study="often-killed")
    kit, record = pair.kit(LEAD), Record(pair.kit(SERVER) / "medsilo" / "often-killed")

    def until_round(number: int) -> None:
        wait_until(lambda: len(record.rounds()) >= number, 120, f"round {number}")

    def resume(job: str | Path) -> str:
        capsys.readouterr()
        assert cli.main(["resume", str(job), "--kit", str(kit)]) == 0
        new = capsys.readouterr().out.strip()
        assert status_of(kit, new) in ("RUNNING", "FINISHED:COMPLETED")  # all hospitals have joined
        return new

    # The server's job process dies.
    first = lead.submit(tmp_path / "job", kit, print)
    until_round(3)
    assert cli.main(["resume", first, "--kit", str(kit)]) == 1
    assert f"job {first} is RUNNING; 'medsilo cancel {first}' ends it first" in capsys.readouterr().err
    (process,) = pair.family(SERVER, "runner_process")
    process.kill()
    assert ended(kit, first) in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    capsys.readouterr()
    assert cli.main(["status", first, "--watch", "--kit", str(kit)]) == 1
    assert "process" in capsys.readouterr().out.splitlines()[-3]  # why, though nothing of the job is left to say it
    done = record.load_checkpoint()[1]["round"]
    assert 3 <= done < 40
    second = resume(first)
    until_round(done + 4)

    # The server's machine dies, and comes back: what it forgot is ended.
    pair.kill(SERVER)
    pair.start_party(SERVER)
    pair.await_hospitals()
    assert ended(kit, second) == "FINISHED:ABNORMAL"
    done = record.load_checkpoint()[1]["round"]
    third = resume(second)
    until_round(done + 4)

    # A hospital's machine dies, and does not come back in time.
    pair.kill(TWO[1])
    assert ended(kit, third) == "FINISHED:EXECUTION_EXCEPTION"
    before = len(pair.log(TWO[1]))
    pair.start_party(TWO[1])
    pair.wait_for_log(TWO[1], REGISTERED, before)
    summary = record.summary()
    assert summary.status == "failed" and f"{TWO[1]} lost:" in summary.reason
    assert cli.main(["status", third, "--watch", "--kit", str(kit)]) == 1
    watched = capsys.readouterr().out
    assert f"to go on from the last finished round: medsilo resume {third}" in watched and summary.reason in watched
    fourth = resume(lead.download(third, kit, tmp_path / "runs"))  # what was fetched knows its job
    assert ended(kit, fourth) == "FINISHED:COMPLETED"

    assert [line.round for line in record.rounds()] == list(range(1, 41))
    assert_same_outcome(tmp_path / "loop", gathered(pair, "often-killed", TWO, tmp_path / "secure"))
    assert (record.folder / "jobs.txt").read_text().split() == [first, second, third, fourth]
    assert all(site.warnings == {} for site in record.summary().sites.values())
    assert cli.main(["resume", fourth, "--kit", str(kit)]) == 1
    assert "is finished; there is nothing to resume" in capsys.readouterr().err
    assert read_summary(record.folder).status == "finished"


def start_slowly(pair: Consortium, hospital: str) -> None:
    """Hold the process of a hospital's next job for some seconds, in which the server's could end."""
    wait_until(lambda: bool(pair.family(hospital, OF_JOB)), 120, "the job's process", every=0.05)
    (process,) = pair.family(hospital, OF_JOB)
    process.suspend()
    time.sleep(15)
    process.resume()


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
    process.kill()  # before it has told its end
    assert ended(kit, job) in ("FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION")
    capsys.readouterr()
    wait_until(lambda: not pair.family(TWO[0], OF_JOB), 120, "the end of the first job's process")
    late = threading.Thread(target=start_slowly, args=(pair, TWO[0]))
    late.start()
    assert cli.main(["resume", job, "--kit", str(kit)]) == 0
    late.join()
    new = capsys.readouterr().out.strip()
    assert ended(kit, new) == "FINISHED:COMPLETED"
    assert set(studies.glob("*")) - known == {folder}  # no second study
    fetched = lead.download(new, kit, tmp_path / "runs")
    assert fetched.name == folder.name and len(Record(fetched).rounds()) == 30
    assert read_summary(fetched) == read_summary(folder)


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
