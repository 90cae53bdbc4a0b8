"""A study resumes automatically if the process of the study's job has died.

The tests check when and how often a study resumes, and check the entries in events.log.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nvflare.fuel.flare_api.api_spec import AuthorizationError
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import ServerCommandRegister
from nvflare.private.fed.server.job_cmds import JobCommandModule

from medsilo.core.errors import NoRoom
from medsilo.flare.study_events import StudyEvents
from medsilo.runs import event_reading, events
from medsilo.runs.rounds import RequestStatus, SiteTurn
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_server.flare import resuming
from medsilo_server.flare.resuming import Resuming
from medsilo_server.flare.slow_sites import SlowSites
from medsilo_server.record import Record
from nvflare_reliability.kit_patches import hear_of_aborts
from tests.conftest import SITES, make_plan

DEAD = "FINISHED:ABNORMAL"
TINY = ("training.rounds=2", "participation.resume=2")


class Server:
    looks = sys.maxsize

    @property
    def shutdown(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Books:
    def __init__(self, *jobs: dict[str, Any]) -> None:
        self.jobs = {job["job_id"]: SimpleNamespace(job_id=job["job_id"], meta=job) for job in jobs}
        self.server = Server()
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

    def set_status(self, of: str, status: Any, context: None) -> None:
        self.jobs[of].meta["status"] = status.value

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
    monkeypatch.setattr(resuming, "LOOK", 0.01)
    monkeypatch.setattr(resuming, "PAUSE", 0.0)
    plan, study = make_plan("fedavg", *TINY), tmp_path / "medsilo/lungs"
    (study / "checkpoints").mkdir(parents=True)
    (study / "plan.yaml").write_text(plan.to_yaml())
    (study / "jobs.txt").write_text("job-1\n")
    (study / "checkpoints/round-1.safetensors").write_bytes(b"x")
    events.write(tmp_path, events.Event("began", "FedAvg", study="lungs", job="job-1"))
    return tmp_path


def begun(own: Resuming) -> threading.Thread:
    before = {*threading.enumerate()}
    own.begin()
    (watching,) = {*threading.enumerate()} - before
    return watching


def after(kit: Path, books: Books) -> list[str]:
    known, books.server = set(books.jobs), Server()
    watching = begun(Resuming(books, kit, kit / "medsilo"))
    books.server.looks = 3
    watching.join(60)
    assert not watching.is_alive()
    return sorted(set(books.jobs) - known)


def told(kit: Path) -> list[tuple[str, str, str]]:
    return [(columns[1], columns[2], columns[6]) for line in event_reading.read(kit) if (columns := line.split("\t"))]


def failed(kit: Path, passing: bool) -> None:
    values = {"schema": 1, "status": "failed", "reason": "why", "metric": "accuracy", "method": "fedavg"}
    values |= {"title": "FedAvg", "rounds": {"planned": 2, "done": 1}, "sites": {}, "passing": passing}
    (kit / "medsilo/lungs/summary.json").write_text(json.dumps(values))


def test_a_study_whose_server_died_goes_on_under_the_same_lead(kit: Path) -> None:
    books = Books(job(job_clients={}, schedule_history=["x"]))
    assert after(kit, books) == ["job-1+"]
    new = books.jobs["job-1+"].meta
    assert (new["cloned_from"], new["submitter_name"], new["scope"]) == ("job-1", "lead", "s")
    [(at, done)] = new["resumed"]
    assert abs(at - time.time()) < 60 and done == 0
    assert not {"job_clients", "schedule_history", "goes_on"} & set(new)
    # a command that watches the study waits until the new job runs
    assert books.jobs["job-1"].meta["goes_on"]["turn"] == "1 of 2"
    level, what, text = told(kit)[-1]
    assert (level, what) == ("INFO", "failed") and "1 of 2" in text
    assert after(kit, books) == []
    # a lead has written an invalid value into the job's meta.json
    for wrong in (-1_000_000, "x", [[None, 1]], [7], {"at": 1}):
        books = Books(job(resumed=wrong))
        assert after(kit, books) == ["job-1+"] and len(books.jobs["job-1+"].meta["resumed"]) == 1


def test_the_pause_begins_when_the_job_died_not_when_its_server_is_back(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "PAUSE", 30.0)
    assert after(kit, Books(job())) == [] and "goes on in 30 s" in told(kit)[-1][2]
    long_ago = time.time() - 31
    os.utime(kit / "medsilo/lungs/jobs.txt", (long_ago, long_ago))
    assert after(kit, Books(job())) == ["job-1+"]


def test_it_goes_on_so_many_times_and_then_somebody_is_told(kit: Path) -> None:
    (kit / "medsilo/lungs/jobs.txt").write_text("job-1\njob-2\njob-3\n")
    times = [[time.time() - 7200, 0], [time.time() - 3600, 0]]
    last = job("job-3", submit_time=3.0, resumed=times, cloned_from="job-2")
    dead = [job("job-2", submit_time=2.0, resumed=times[:1]), last]
    events.write(kit, events.Event("resumed", "FedAvg", study="lungs", job="job-3"))
    assert after(kit, Books(job(), *dead)) == []
    level, what, text = told(kit)[-1]
    assert (level, what) == ("WARNING", "failed") and "2 times within a day" in text
    before = told(kit)
    # the server reports the end of the study only once, even after a restart
    assert after(kit, Books(job(), *dead)) == [] and told(kit) == before
    # A lead resumed the study by `medsilo resume`, so earlier automatic resumptions no longer count.
    by_hand = job("job-4", submit_time=4.0, cloned_from="job-3")
    (kit / "medsilo/lungs/jobs.txt").write_text("job-1\njob-2\njob-3\njob-4\n")
    assert after(kit, Books(job(), *dead, by_hand)) == ["job-4+"]


def test_what_a_person_has_to_mend_or_ended_does_not_go_on(kit: Path) -> None:
    failed(kit, passing=False)
    assert after(kit, Books(job())) == []
    old = time.time() - 60
    os.utime(kit / "medsilo/lungs/summary.json", (old, old))
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


def test_a_study_that_waits_to_go_on_can_be_cancelled(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "PAUSE", 600.0)
    books = Books(job())
    own = Resuming(books, kit, kit / "medsilo")
    watching = begun(own)
    assert "goes on in" in lead.waits_to_go_on(books.jobs["job-1"].meta)
    own.cancel("job-2", "somebody")
    own.cancel("job-1", "lead@clinic")
    later = time.monotonic() + 601.0
    monkeypatch.setattr(resuming.time, "monotonic", lambda: later)
    books.server.looks = 3
    watching.join(60)
    assert not watching.is_alive()
    assert list(books.jobs) == ["job-1"] and books.jobs["job-1"].meta["status"] == "FINISHED:ABORTED"
    assert not lead.waits_to_go_on(books.jobs["job-1"].meta)
    assert told(kit)[-1] == ("INFO", "ended", "lead@clinic cancelled it while it waited to go on")
    assert after(kit, books) == []  # a cancelled study stays cancelled when the server starts again


def test_nvflares_own_command_for_an_abort_tells_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    # monkeypatch restores NVFlare's method after the test
    monkeypatch.setattr(JobCommandModule, "abort_job", JobCommandModule.abort_job)
    heard = list[tuple[str, str]]()
    hear_of_aborts(lambda job, who: heard.append((job, who)))
    known = ServerCommandRegister(None)
    known.register_module(JobCommandModule())
    known.finalize()
    conn = Connection({})
    conn.app_ctx = Mock()
    conn.set_prop(ConnProps.USER_NAME, "lead@clinic")
    conn.set_prop(JobCommandModule.JOB_ID, "job-1")
    (entry,) = known.get_command_entries("abort_job")
    entry.handler(conn, ["abort_job", "job-1"])
    assert heard == [("job-1", "lead@clinic")]


def test_a_job_that_dies_is_told_once_unless_its_study_said_so(kit: Path) -> None:
    books = Books(job(), job("job-2", "FINISHED:COMPLETED"), job("job-3"), job("job-4", "FINISHED:ABORTED"))
    own = Resuming(books, kit, kit / "medsilo")
    events.write(kit, events.Event("ended", "the run was aborted", job="job-4"))
    for number in (1, 2, 3, 4, 1, 3):
        said: Any = SimpleNamespace(get_prop=lambda key, of=number: {"job_id": f"job-{of}"})
        own.ended(said)
    found = [line.split("\t")[1:6:4] + line.split("\t")[2:3] for line in event_reading.read(kit)]
    assert found[2:] == [["INFO", "job-1", "failed"], ["WARNING", "job-3", "failed"], ["INFO", "job-1", "waits"]]


def test_a_study_that_waits_says_what_ended_it(kit: Path) -> None:
    """The log contains medsilo's reason (a full disk), because NVFlare reports only that the process died."""
    events.write(kit, events.Event("failed", "the disk is full", study="lungs", job="job-1", needs_somebody=True))
    own = Resuming(Books(job()), kit, kit / "medsilo")
    for _ in range(2):
        own.ended(SimpleNamespace(get_prop=lambda key: {"job_id": "job-1"}))  # type: ignore[arg-type]
    assert [text.count("goes on") for _, what, text in told(kit) if what == "waits"] == [1, 1]
    assert told(kit)[2][1] == "waits" and told(kit)[2][2].startswith("the disk is full; goes on")


def test_it_waits_for_hospitals_and_for_room(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(job())
    books.here = SITES[:1]
    assert after(kit, books) == []
    monkeypatch.setattr(resuming, "GATHER", 0.0)
    assert after(kit, books) == ["job-1+"]
    monkeypatch.setattr(resuming.shutil, "disk_usage", lambda path: SimpleNamespace(free=resuming.LEAST_ROOM))
    assert after(kit, Books(job())) == []


def test_a_job_that_never_led_goes_on_with_the_study_it_was_for(kit: Path) -> None:
    lost = job("job-2", "FINISHED:FAILED_TO_RUN", submit_time=2.0, cloned_from="job-1", resumed=[[time.time(), 0]])
    books = Books(job(), lost)
    assert after(kit, books) == ["job-2+"]
    assert books.jobs["job-2+"].meta["cloned_from"] == "job-1" and len(books.jobs["job-2+"].meta["resumed"]) == 2


def test_a_time_counts_for_a_day_and_until_ten_more_rounds_are_done(kit: Path) -> None:
    """An automatic resumption counts towards the limit until a day has passed or ten more rounds are complete.

    A study without progress ends after some resumptions, while a long study survives many interruptions.
    """

    def with_rounds(number: int) -> None:
        line = {"seconds": 1.0, "asked": [], "answered": [], "refused": {}, "lost": {}, "sites": {}, "phase": "train"}
        lines = (json.dumps({"round": one + 1, **line}) + "\n" for one in range(number))
        (kit / "medsilo/lungs/rounds.jsonl").write_text("".join(lines))

    now = time.time()
    for times, rounds, goes in (
        ([[now - 90_000, 0], [now - 3600, 0]], 5, ["job-1+"]),
        ([[now - 7200, 0], [now - 3600, 0]], 5, []),
        ([[now - 7200, 0], [now - 3600, 8]], 10, ["job-1+"]),
        ([[now - 7200, 1], [now - 3600, 8]], 10, []),
    ):
        with_rounds(rounds)
        assert after(kit, Books(job(resumed=times))) == goes, (times, rounds)


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
    jobs, said = {"job-1": job(goes_on={"at": time.time() + 60, "turn": "1 of 2"})}, list[str]()

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
    assert cancelled.look(session) == "FINISHED:ABORTED"
    jobs["job-3"] = job("job-3", "SUBMITTED", cloned_from="job-2", submit_time=3.0)
    assert cancelled.look(session) is None and cancelled.job_id == "job-3"


def test_status_lists_what_runs_first_and_says_when_a_study_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`medsilo status` lists running jobs first, even if many newer jobs have ended."""
    waits = {"at": time.time() + 20, "turn": "2 of 30"}
    jobs = [job(f"done-{number}", "FINISHED:COMPLETED") for number in range(30)]
    jobs += [job("waits", goes_on=waits), job("went-on", goes_on=waits), job("long", "RUNNING")]
    jobs.insert(0, job("next", "FINISHED:COMPLETED", cloned_from="went-on"))
    info = SimpleNamespace(server_info=SimpleNamespace(start_time=0.0), client_info=[])

    def nobody(*given: Any) -> Any:
        raise AuthorizationError("another's")

    @contextmanager
    def connected(kit: Path) -> Iterator[Any]:
        yield SimpleNamespace(
            get_system_info=lambda: info,
            list_jobs=lambda limit, **_: jobs[:limit],
            get_job_meta=lambda of: next(one for one in jobs if one["job_id"] == of),
            do_app_command=nobody,
        )

    monkeypatch.setattr(lead, "connected", connected)
    lines = lead.status(Path("kit")).lines()
    assert lines[1].startswith("long  RUNNING") and len(lines) == 21
    assert "goes on in 20 s, 2 of 30" in lead.status(Path("kit"), "waits").lines()[0]
    assert "goes on" not in lead.status(Path("kit"), "went-on").lines()[0]


def test_a_lead_reads_in_the_job_s_meta_why_it_failed(kit: Path) -> None:
    books = Books(job("job-1"), job("job-2"), job("job-3"), job("job-4", "FINISHED:ABORTED"))
    refused = "plan 3f9a of lead: joining: 0 of 1 sites answered, the plan needs 1: north refused: this hospital "
    events.write(kit, events.Event("failed", f"{refused}has not approved plan 3f9a; its engineer decides", job="job-1"))
    events.write(kit, events.Event("failed", "the disk is full", job="job-2"))
    events.write(kit, events.Event("ended", "somebody ended it", job="job-4"))
    own = Resuming(books, kit, kit / "medsilo")
    for number in (1, 2, 3, 4):
        said: Any = SimpleNamespace(get_prop=lambda key, of=number: {"job_id": f"job-{of}"})
        own.ended(said)
    outcomes = {name: lead._job_state(one.meta).outcome for name, one in books.jobs.items()}
    assert outcomes == {"job-1": "refused: not approved", "job-2": "failed: the disk is full", "job-3": "", "job-4": ""}
    assert "EXECUTION_EXCEPTION" not in lead._job_state(books.jobs["job-1"].meta).line()


def test_a_hospital_that_is_slow_or_back_is_a_line_with_its_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def turns(number: int, **sites: tuple[float, float | None]) -> RequestStatus:
        told = {site: SiteTurn(asked=asked, answered=answered) for site, (asked, answered) in sites.items()}
        return RequestStatus(task="round", round=number, at=1.0, sites=told)

    caplog.set_level("INFO")
    study = StudyEvents(tmp_path, "job-1", "lungs")
    sites = SlowSites(study)
    sites.look(turns(1, north=(500.0, None), south=(500.0, None)), [])
    sites.look(turns(1, north=(60.0, None), south=(61.0, 20.0)), [])
    for seconds in (61.0, 300.0):
        sites.look(turns(1, north=(seconds, None), south=(seconds, 20.0)), [])
    sites.look(turns(1, north=(400.0, 399.0), south=(400.0, 20.0)), [])
    study.on_round(2, {"north": "lost: no answer", "south": None})
    study.on_round(3, {"north": None, "south": None})
    assert [(level, what) for level, what, _ in told(tmp_path)] == [
        ("WARNING", "slow"),
        ("INFO", "slow"),
        ("WARNING", "away"),
        ("INFO", "back"),
    ]
    logged = [(one.levelname, one.getMessage().partition(":")[0]) for one in caplog.records]
    assert logged == [
        ("WARNING", "slow north"),
        ("INFO", "slow north"),
        ("WARNING", "away north"),
        ("INFO", "back north"),
    ]
