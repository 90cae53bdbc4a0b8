"""Studies whose job died go on by themselves: when, how often, and what events.log says of it."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.flare_api.api_spec import AuthorizationError

from medsilo.core.errors import NoRoom
from medsilo.federation import inprocess
from medsilo.flare import resuming
from medsilo.flare.resuming import Resuming
from medsilo.runs import event_reading, events
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.conftest import SITES, make_plan

DEAD = "FINISHED:ABNORMAL"
TINY = ("training.rounds=2", "participation.resume=2")


class Books:
    """A server's engine and its job manager."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self.jobs = {job["job_id"]: SimpleNamespace(job_id=job["job_id"], meta=job) for job in jobs}
        self.server = SimpleNamespace(shutdown=False)
        self.here = list(SITES)

    def get_component(self, name: str) -> "Books":
        return self

    @contextmanager
    def new_context(self) -> Iterator[None]:
        yield

    def get_clients(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.here]

    def get_all_jobs(self, context: None) -> list[Any]:
        return [*self.jobs.values()]

    def update_meta(self, of: str, meta: dict[str, Any], context: None) -> None:
        self.jobs[of].meta.update(meta)

    def get_job(self, job: str, context: None) -> Any:
        return self.jobs[job]

    def get_jobs_by_status(self, states: list[str], context: None) -> list[Any]:
        return [job for job in self.jobs.values() if job.meta["status"] in states]

    def clone(self, of: str, meta: dict[str, Any], context: None) -> None:
        job = {**meta, "job_id": f"{of}+", "status": "SUBMITTED", "submit_time": time.time()}
        self.jobs[job["job_id"]] = SimpleNamespace(job_id=job["job_id"], meta=job)


def job(of: str = "job-1", status: str = DEAD, **more: Any) -> dict[str, Any]:
    return {"job_id": of, "status": status, "submit_time": 1.0, "submitter_name": "lead", "scope": "s", **more}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's kit with a study whose job was killed in round 2."""
    monkeypatch.setattr(resuming, "LOOK", 0.01)
    monkeypatch.setattr(resuming, "PAUSE", 0.0)
    plan, study = make_plan("fedavg", *TINY), tmp_path / "medsilo/lungs"
    (study / "checkpoints").mkdir(parents=True)
    (study / "plan.yaml").write_text(plan.to_yaml())
    (study / "jobs.txt").write_text("job-1\n")
    (study / "checkpoints/round-1.safetensors").write_bytes(b"x")
    events.write(tmp_path, events.Event("began", "FedAvg", study="lungs", job="job-1"))
    return tmp_path


def after(kit: Path, books: Books) -> list[str]:
    """Start a server over these books; returns the jobs that it submitted within a moment."""
    known = set(books.jobs)
    own = Resuming(books, kit, kit / "medsilo")
    own.begin()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline and not set(books.jobs) - known:
        time.sleep(0.01)
    books.server.shutdown = True
    return sorted(set(books.jobs) - known)


def told(kit: Path) -> list[tuple[str, str, str]]:
    return [(columns[1], columns[2], columns[6]) for line in event_reading.read(kit) if (columns := line.split("\t"))]


def failed(kit: Path, passing: bool) -> None:
    """The study's own word that it failed; written after its job began to lead it."""
    values = {"schema": 1, "status": "failed", "reason": "why", "metric": "accuracy", "method": "fedavg"}
    values |= {"title": "FedAvg", "rounds": {"planned": 2, "done": 1}, "sites": {}, "passing": passing}
    (kit / "medsilo/lungs/summary.json").write_text(json.dumps(values))


def test_a_study_whose_server_died_goes_on_under_the_same_lead(kit: Path) -> None:
    books = Books(job(job_clients={}, schedule_history=["x"]))
    assert after(kit, books) == ["job-1+"]
    new = books.jobs["job-1+"].meta
    assert (new["cloned_from"], new["submitter_name"], new["scope"], new["resumed"]) == ("job-1", "lead", "s", 1)
    assert not {"job_clients", "schedule_history", "goes_on"} & set(new)
    assert books.jobs["job-1"].meta["goes_on"] == "1 of 2"  # whoever watches it waits
    level, what, text = told(kit)[-1]
    assert (level, what) == ("INFO", "failed") and "1 of 2" in text
    books.server.shutdown = False
    assert after(kit, books) == []  # the new job waits for its hospitals
    books = Books(job(resumed=-1_000_000))  # a lead wrote it into the job's meta.json, to go on for ever
    assert after(kit, books) == ["job-1+"] and books.jobs["job-1+"].meta["resumed"] == 1


def test_it_goes_on_so_many_times_and_then_somebody_is_told(kit: Path) -> None:
    (kit / "medsilo/lungs/jobs.txt").write_text("job-1\njob-2\njob-3\n")
    dead = [job("job-2", submit_time=2.0, resumed=1), job("job-3", submit_time=3.0, resumed=2, cloned_from="job-2")]
    events.write(kit, events.Event("resumed", "FedAvg", study="lungs", job="job-3"))
    assert after(kit, Books(job(), *dead)) == []
    level, what, text = told(kit)[-1]
    assert (level, what) == ("WARNING", "failed") and "2 times already" in text
    before = told(kit)
    assert after(kit, Books(job(), *dead)) == [] and told(kit) == before  # at the server's next start it is known
    # a lead typed `medsilo resume`: NVFlare's copy does not count
    by_hand = job("job-4", submit_time=4.0, cloned_from="job-3")
    (kit / "medsilo/lungs/jobs.txt").write_text("job-1\njob-2\njob-3\njob-4\n")
    assert after(kit, Books(job(), *dead, by_hand)) == ["job-4+"]


def test_what_a_person_has_to_mend_or_ended_does_not_go_on(kit: Path) -> None:
    failed(kit, passing=False)
    assert after(kit, Books(job())) == []
    old = time.time() - 60
    os.utime(kit / "medsilo/lungs/summary.json", (old, old))  # of the job before this one
    assert after(kit, Books(job())) == ["job-1+"]
    failed(kit, passing=True)
    assert after(kit, Books(job())) == ["job-1+"]
    assert after(kit, Books(job(status="FINISHED:ABORTED"))) == []
    assert after(kit, Books(job(), job("job-2", "RUNNING", submit_time=2.0, cloned_from="job-1"))) == []
    (kit / "medsilo/lungs/checkpoints/round-1.safetensors").unlink()
    assert after(kit, Books(job())) == []
    plan = kit / "medsilo/lungs/plan.yaml"
    plan.write_text(plan.read_text().replace("resume: 2", "resume: 0"))
    assert after(kit, Books(job())) == []


def test_a_job_that_dies_is_told_once_unless_its_study_said_so(kit: Path) -> None:
    books = Books(job(), job("job-2", "FINISHED:COMPLETED"), job("job-3"), job("job-4", "FINISHED:ABORTED"))
    own = Resuming(books, kit, kit / "medsilo")
    events.write(kit, events.Event("ended", "the run was aborted", job="job-4"))
    for number in (1, 2, 3, 4, 1, 3):
        said: Any = SimpleNamespace(get_prop=lambda key, of=number: {"job_id": f"job-{of}"})
        own.ended(said)
    found = [line.split("\t")[1:6:4] + line.split("\t")[2:3] for line in event_reading.read(kit)]
    assert found[2:] == [["INFO", "job-1", "failed"], ["WARNING", "job-3", "failed"], ["INFO", "job-1", "waits"]]


def test_it_waits_for_hospitals_and_for_room(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(job())
    books.here = SITES[:1]
    assert after(kit, books) == []
    books.server.shutdown = False
    monkeypatch.setattr(resuming, "GATHER", 0.0)
    assert after(kit, books) == ["job-1+"]  # then as the plan lets it
    monkeypatch.setattr(resuming.shutil, "disk_usage", lambda path: SimpleNamespace(free=resuming.LEAST_ROOM))
    assert after(kit, Books(job())) == []


def test_a_job_that_never_led_goes_on_with_the_study_it_was_for(kit: Path) -> None:
    lost = job("job-2", "FINISHED:FAILED_TO_RUN", submit_time=2.0, cloned_from="job-1", resumed=1)
    books = Books(job(), lost)
    assert after(kit, books) == ["job-2+"]
    assert books.jobs["job-2+"].meta["cloned_from"] == "job-1" and books.jobs["job-2+"].meta["resumed"] == 2


def test_a_full_disk_passes_and_a_missing_hospital_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise NoRoom("the disk is full")

    plan = make_plan("fedavg", "training.rounds=1")
    with monkeypatch.context() as patched, pytest.raises(NoRoom):
        patched.setattr(Record, "add_round", full)
        inprocess.run(plan, folder=tmp_path / "full")
    summary = Record(tmp_path / "full").summary()
    assert summary and summary.passing and summary.reason == "the disk is full"


def test_whoever_watches_is_led_into_the_job_that_goes_on() -> None:
    jobs, said = {"job-1": job(goes_on="1 of 2")}, list[str]()

    def left(*given: Any) -> str:
        raise AuthorizationError("of those who may not download")

    session: Any = SimpleNamespace(
        get_job_meta=jobs.__getitem__,
        list_jobs=lambda **_: [*reversed(jobs.values())],
        download_job_result=left,
    )
    watching = lead._Watching("job-1", lambda line, study: None, said.append)
    assert watching.look(session) is None and "1 of 2" in said[-1]
    jobs["job-2"] = job("job-2", "FINISHED:COMPLETED", cloned_from="job-1", submit_time=2.0)
    assert watching.look(session) is None and "job-2" in said[-1]
    assert watching.look(session) == "FINISHED:COMPLETED" and watching.job_id == "job-2"
    cancelled = lead._Watching("job-2", lambda line, study: None, said.append)
    jobs["job-2"]["status"] = "FINISHED:ABORTED"
    assert cancelled.look(session) == "FINISHED:ABORTED"  # at once
    jobs["job-3"] = job("job-3", "SUBMITTED", cloned_from="job-2", submit_time=3.0)
    assert cancelled.look(session) is None and cancelled.job_id == "job-3"
