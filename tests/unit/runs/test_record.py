"""A run's record lists the jobs that led the study, and allows only one job at a time to lead."""

from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.rounds import Round
from medsilo_server import record
from medsilo_server.record import Record, new_rounds
from tests.unit.medsilo_lab.test_report import summary_of


def test_one_job_leads_a_study_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LET_GO", 0.1)
    one, other = Record(tmp_path / "one"), Record(tmp_path / "other")
    with one.led_by("job-1"):
        with (
            pytest.raises(MedsiloError, match="another job leads one now; 'medsilo status'"),
            one.led_by("2"),
        ):
            raise AssertionError
        with other.led_by("job-3"):
            pass
    with one.led_by("job-4"):
        pass
    assert (one.folder / "jobs.txt").read_text().split() == ["job-1", "job-4"]
    for job, study in (("job-1", one), ("job-4", one), ("job-3", other)):
        found = Record.of_job(tmp_path, job)
        assert found and found.folder == study.folder
    assert Record.of_job(tmp_path, "job") is None


def test_what_there_is_to_go_on_from(tmp_path: Path) -> None:
    run = Record(tmp_path)
    assert not run.can_go_on()
    run.save_checkpoint(0, {}, {"best": None})
    assert run.can_go_on()
    run.write_summary(summary_of("fedavg", "FedAvg", {"a": None}, status="failed"))
    assert run.can_go_on()
    run.write_summary(summary_of("fedavg", "FedAvg", {"a": 0.5}))
    assert not run.can_go_on()


def test_a_study_belongs_to_whoever_submitted_it(tmp_path: Path) -> None:
    record = Record(tmp_path / "study")
    record.claim("lead@a.org", resume=False)
    record.claim("lead@a.org", resume=True)
    for rival in ("lead@b.org", None):
        for resume in (False, True):
            with pytest.raises(MedsiloError, match="belongs to another lead; choose another name"):
                record.claim(rival, resume)
    older = Record(tmp_path / "older")
    older.folder.mkdir()
    with pytest.raises(MedsiloError, match="has no recorded owner"):
        older.claim("lead@b.org", resume=True)
    with pytest.raises(MedsiloError, match="has no recorded owner"):
        older.check_owner("lead@b.org")
    with pytest.raises(MedsiloError, match="study study belongs to another lead"):
        record.check_owner("lead@b.org")
    record.check_owner("lead@a.org")
    Record(tmp_path / "simulation").claim(None, resume=False)
    assert not (tmp_path / "simulation").exists()


def test_new_rounds_are_told_from_where_they_are_asked(tmp_path: Path) -> None:
    rounds = [Round(round=number, asked=["x" * (number % 7)]) for number in range(1, 41)]
    for line in rounds:
        Record(tmp_path).add_round(line)
    sizes = [len(line) for line in (tmp_path / "rounds.jsonl").read_bytes().splitlines(keepends=True)]
    assert new_rounds(rounds, 0, sum(sizes)) == rounds
    assert new_rounds(rounds, 0, sum(sizes) - 1) == rounds[:-1]
    assert new_rounds(rounds, 39, 1) == rounds[39:] and new_rounds(rounds, 40, 1000) == []
    told: list[Round] = []
    # a command that watches a study repeatedly requests new rounds; a request may find no new round
    for _ in range(40):
        told += new_rounds(rounds, told[-1].round if told else 0, 200)
    assert told == rounds


def test_only_what_ended_well_is_finished(tmp_path: Path) -> None:
    run = Record(tmp_path)
    assert run.finished() is None
    run.write_summary(summary_of("fedavg", "FedAvg", {"a": None}, status="failed"))
    assert run.finished() is None
    run.write_summary(summary_of("fedavg", "FedAvg", {"a": 0.5}))
    assert run.finished() == run.summary()


def test_nvflares_folder_around_a_run_names_the_run_in_it(tmp_path: Path) -> None:
    """A folder from NVFlare's simulator or from 'nvflare job download' contains the run in a subfolder, which the error
    names.
    """
    for place in ("server/medsilo/one", "job/workspace/medsilo/one"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / paths.SUMMARY).write_text("{}")
    for folder, told in ((tmp_path, "server/medsilo/one"), (tmp_path / "job", "workspace/medsilo/one")):
        with pytest.raises(MedsiloError, match=f"give {told} in it"):
            read_summary(folder)
