"""Several processes of a kit write to the same events.log, whose size is limited."""

import hashlib
import json
import os
import signal
import threading
import time
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.server.client_manager import ClientManager

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.flare import executor as executing
from medsilo.flare import kit_events
from medsilo.flare.executor import MedsiloExecutor, SiteEvents
from medsilo.flare.kit_events import (
    GRACE,
    LATE,
    OFTEN,
    SILENCE,
    TWICE,
    Attendance,
    EventKeeper,
    HospitalEvents,
    LastContact,
    ServerEvents,
)
from medsilo.flare.study_events import StudyEvents
from medsilo.runs import event_reading, events, paths
from medsilo.runs.event_chain import HEAD, EventChain
from medsilo.runs.events import Event, write
from medsilo_server.flare.admission import KnownHospitals
from tests.secure.consortium import wait_until
from tests.unit.medsilo_lab.test_provision import kits_of
from tests.unit.site.test_approvals import Home


def columns(kit: Path, *numbers: int) -> list[tuple[str, ...]]:
    return [tuple(line.split("\t")[number] for number in numbers) for line in event_reading.read(kit)]


def test_who_joins_goes_away_and_comes_back_is_told_once() -> None:
    attendance, told = Attendance(), list[tuple[str, str, bool]]()

    def look(now: float, process: str = "p", **seen: LastContact) -> None:
        attendance.processes |= dict.fromkeys(attendance.there.keys() & seen.keys(), process)
        told.extend((one.what, one.who, one.needs_somebody) for one in attendance.look(seen, now))

    for now in (0.0, 2.0):
        look(now, north=LastContact(True, now), relayed=LastContact(False, now))
    assert told == [("joined", "north", False), ("joined", "relayed", False)]
    told.clear()
    look(
        4.0, north=LastContact(False, 2.0), relayed=LastContact(False, 2.0)
    )  # a broken connection often returns within seconds
    look(6.0, north=LastContact(True, 2.0), relayed=LastContact(False, 2.0))
    assert told == []
    for now in (8.0, 9.0 + GRACE, 10.0 + GRACE, 3.0 + SILENCE, 4.0 + SILENCE):
        look(now, north=LastContact(False, 2.0), relayed=LastContact(False, 2.0))
    assert told == [("away", "north", True), ("away", "relayed", True)]
    told.clear()
    look(200.0, north=LastContact(True, 200.0), relayed=LastContact(False, 200.0))
    look(202.0, north=LastContact(True, 200.0, "another"))
    look(204.0, north=LastContact(True, 200.0, "a third"))
    assert [what for what, *_ in told] == ["back", "back", "away"]
    look(206.0, "q", north=LastContact(True, 200.0, "a fourth"))
    assert told.pop() == ("back", "north", False)
    told.clear()
    # the hospital's machine has stopped, but the hospital's connection is still open
    for now in (272.0, 201.0 + SILENCE, 203.0 + SILENCE):
        look(now, north=LastContact(True, 200.0, "a fourth"))
    look(300.0, north=LastContact(True, 300.0, "a fourth"))
    assert told == [("away", "north", True), ("back", "north", False)]


def test_who_is_silent_is_called_and_away_where_it_does_not_answer() -> None:
    attendance, seen = Attendance(), {name: LastContact(True, 2.0, cell=f"relay.{name}") for name in ("north", "south")}
    list(attendance.look(seen, 2.0))
    assert not attendance.late(seen, 2.0 + LATE)
    assert attendance.late(seen, 2.1 + LATE) == {"north": "relay.north", "south": "relay.south"}
    assert [one.who for one in attendance.look(seen, 3.0 + LATE, deaf=["south"])] == ["south"]
    assert [one.what for one in attendance.look(seen, 5.0 + LATE)] == ["back"]


def test_a_clock_that_is_set_makes_nobody_away_and_hides_nobody() -> None:
    """A change of the clock by two hours makes no hospital absent or present."""
    attendance, told = Attendance(), list[tuple[str, str]]()
    for now, heard, connected in (
        (0.0, 5000.0, True),
        (2.0, 5000.0, True),
        (4.0, 12_200.0, True),
        (6.0, 12_200.0, True),
        (8.0, 5008.0, True),
        (10.0, 5008.0, False),
        (12.0 + GRACE, 5008.0, False),
    ):
        seen = {"north": LastContact(connected, heard), "relayed": LastContact(False, heard if now < 10 else 5008.0)}
        told.extend((one.what, one.who) for one in attendance.look(seen, now))
    assert told == [("joined", "north"), ("joined", "relayed"), ("away", "north")]
    assert [one.who for one in attendance.look(seen, 10.0 + SILENCE)] == ["relayed"]


def test_a_restart_is_an_event_however_soon_and_a_second_registration_is_none() -> None:
    attendance, told = Attendance(), list[tuple[float, str]]()
    for now, token, process in (
        (0.0, "t1", "p1"),
        (2.0, "t1", "p1"),
        (4.0, "t1", "p2"),  # a heartbeat of another party with a false name
        (6.0, "t2", "p1"),  # the same process registers again
        (40.0, "t3", "p1"),  # the restarted party has registered, but its first heartbeat has not arrived yet
        (42.0, "t3", "p3"),
        (44.0, "t4", "p4"),
        (44.0 + OFTEN, "t5", "p5"),
    ):
        attendance.processes |= dict.fromkeys(attendance.there, process)
        told.extend((now, one.what) for one in attendance.look({"north": LastContact(True, now, token)}, now))
    assert told == [(0.0, "joined"), (42.0, "back"), (44.0 + OFTEN, "back")]


def test_a_study_tells_who_falls_out_and_is_back(tmp_path: Path) -> None:
    study = StudyEvents(tmp_path, "job-1", "lungs")
    for number, lost in enumerate((None, "lost: its connection was\nclosed", "lost: no answer", None), 1):
        study.on_round(number, {"a": None, "b": lost})
    found = columns(tmp_path, 1, 2, 3, 4, 5)
    assert found == [("WARNING", "away", "b", "lungs", "job-1"), ("INFO", "back", "b", "lungs", "job-1")]
    assert columns(tmp_path, 6) == [("round 2: lost: its connection was closed",), ("round 4",)]
    StudyEvents(None).tell("began", "in a simulation")


def test_who_is_asked_again_and_has_answered_is_told_for_a_few_times_an_hour(tmp_path: Path) -> None:
    """The log contains the start and the end of a hospital's problem, and only a limited number of problems per hour.

    A training process that dies in each round does not fill the log.
    """
    study, full = StudyEvents(tmp_path, "job-1", "lungs"), {"a": "the disk is full"}
    for again in (full, full, {}, full, full | {"b": "killed"}):
        study.on_asking(again)
    study.on_round(7, {"a": "refused: the disk is full"})
    study.on_asking({})
    told = [("refused", "a"), ("back", "a"), ("refused", "a"), ("refused", "b"), ("refused", "a"), ("back", "b")]
    assert columns(tmp_path, 2, 3) == told
    for _ in range(20):
        study.on_asking({"b": "killed"})
        study.on_asking({})
    assert columns(tmp_path, 2, 3).count(("refused", "b")) == columns(tmp_path, 2, 3).count(("back", "b")) == 5


def test_a_site_that_is_asked_again_says_once_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site reports a full disk only once, although different files fail and some writes succeed in between."""
    study, now = SiteEvents(tmp_path, "job-1", "lungs"), 0.0
    monkeypatch.setattr(executing.time, "monotonic", lambda: now)
    monkeypatch.setattr(executing.time, "time", lambda: 1e9 + now)
    for number in (40, 41, 42):
        study.on_answer(f"state-{number}.safetensors could not be written: the disk is full", passing=True)
        study.on_answer("killed", died=True, passing=True)
        study.on_answer(f"weights of layer {number} are not finite")
        if number == 41:
            study.on_answer()
    told = [("refused", "state-40.safetensors"), ("failed", "killed"), ("refused", "weights")]
    assert [(what, text.split()[0]) for what, text in columns(tmp_path, 2, 6)] == told
    now = executing.QUIET + 1
    study.on_answer("state-43.safetensors could not be written: the disk is full", passing=True)
    assert len(columns(tmp_path, 1)) == 3
    now = 2 * events.AGAIN
    study.on_answer()
    study.on_answer("state-44.safetensors could not be written: the disk is full", passing=True)
    level, what, text = columns(tmp_path, 1, 2, 6)[3]
    assert (level, what, text.split()[0]) == ("WARNING", "refused", "state-44.safetensors")


def test_a_server_that_provokes_many_errors_does_not_fill_the_log(tmp_path: Path) -> None:
    """A server that causes many errors at a site cannot push earlier requests out of the site's log."""
    study = SiteEvents(tmp_path, "job-1", "lungs")
    for number in range(1000):
        study.on_answer(f"the surplus tensor {chr(97 + number % 26) * (1 + number // 26)}")
    assert len(columns(tmp_path, 2)) == executing.MOST_KINDS


def test_a_site_whose_process_for_the_job_died_says_so_when_another_begins(tmp_path: Path) -> None:
    for job in ("job-1", "job-1", "job-2"):
        SiteEvents(tmp_path, job, "lungs").begin("FedAvg")
    assert columns(tmp_path, 2, 5) == [
        *[("began", "job-1"), ("failed", "job-1"), ("resumed", "job-1"), ("began", "job-2")]
    ]


def test_a_site_says_once_that_its_part_is_over_also_where_the_study_was_cancelled(tmp_path: Path) -> None:
    for answered in (True, False):
        executor, back = MedsiloExecutor(), list[int]()
        executor.events = SiteEvents(tmp_path, f"job-{answered}", "lungs")
        executor.folder = tmp_path / f"site-{answered}"
        executor.handle_event(EventType.END_RUN, FLContext())
        executor.give_back = lambda back=back: back.append(1)
        executor.events.begin("FedAvg")
        if answered:
            executor.events.end("this site answered the test")
        executor.handle_event(EventType.END_RUN, FLContext())
        assert back == [1]
        executor._died_between("killed")
        kinds = [line["kind"] for line in map(json.loads, (executor.folder / paths.DIARY).read_text().splitlines())]
        assert kinds == ["died"] if answered else ["ended", "died"]
    told = [("INFO", "began"), ("INFO", "ended"), ("INFO", "failed")]
    assert columns(tmp_path, 1, 2) == 2 * told
    assert "before the study's last task" in columns(tmp_path, 6)[-2][0]


def test_a_refused_hospital_that_asks_again_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "local").mkdir()
    own, said = ServerEvents(), FLContext()
    said.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path)), private=True, sticky=False)
    own.handle_event(EventType.CLIENT_REGISTER_PROCESSED, said)
    said.set_prop(FLContextKey.UNAUTHENTICATED, "Client 'north' is disabled", private=True, sticky=False)
    for _ in range(3):
        own.handle_event(EventType.CLIENT_REGISTER_PROCESSED, said)
    assert columns(tmp_path, 1, 2, 6) == [("WARNING", "refused", "Client 'north' is disabled")]


def test_a_kit_that_was_started_twice_is_told_and_goes_on_when_one_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "local").mkdir()
    own, now, known = ServerEvents(), [0.0], ClientManager("project")
    monkeypatch.setattr(kit_events.time, "monotonic", lambda: now[0])
    server = SimpleNamespace(logout_client=known.remove_client)
    engine: Any = SimpleNamespace(get_clients=lambda: list(known.clients.values()), server=server)

    def heartbeat(token: str, at: float) -> bool:
        now[0], said = at, FLContext()
        said.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path)), private=True, sticky=False)
        monkeypatch.setattr(said, "get_engine", lambda: engine)
        new = known.heartbeat(token, "north", "north", said)
        own.handle_event(EventType.CLIENT_HEARTBEAT_PROCESSED, said)
        return new

    assert heartbeat("second", 0.0)
    own.attendance.there["north"] = True
    assert not any(heartbeat("first", at) for at in (1.0, 11.0))
    # equal entries of two processes on different days are not duplicates
    assert not any(heartbeat("first", at) for at in range(100, 100 + int(TWICE)))
    assert columns(tmp_path, 1, 2) == []
    assert not any(heartbeat("first", 105.0 + TWICE + at) for at in range(9))
    ((level, what, text),) = columns(tmp_path, 1, 2, 6)
    assert (level, what) == ("WARNING", "refused") and "kit of north" in text
    own.attendance.there["north"] = False
    assert not heartbeat("first", 200.0) and heartbeat("first", 210.0)


def _write_many(kit: str, number: int) -> None:
    for event in range(100):
        write(Path(kit), Event("back", f"{number} {event} " + "x" * 100))


def test_processes_write_one_after_the_other_and_the_file_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LARGEST", 4000)
    fork = get_context("fork")  # a forked process keeps the test's small limit on the log's size
    started = [fork.Process(target=_write_many, args=(str(tmp_path), number)) for number in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    files = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert files == ["events.log", *(f"events.log.{number}" for number in range(1, events.KEPT + 1))]
    assert all((tmp_path / name).stat().st_size <= 4000 for name in files)
    assert (tmp_path / "events.log").stat().st_mode & 0o077 == 0
    lines = list(event_reading.read(tmp_path))
    assert len(lines) > 50 and all(line.count("\t") == 7 and line.split("\t")[6].endswith("x" * 100) for line in lines)
    for number in range(3):
        own = [int(words[1]) for line in lines if (words := line.split("\t")[6].split())[0] == str(number)]
        assert own == sorted(own)


def job_of(kit: Path, lead: str, named: str) -> FLContext:
    said, engine = FLContext(), SimpleNamespace(get_clients=list)
    said.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit)), private=True, sticky=False)
    meta = {"deploy_map": {"app": ["server", named]}, "submitter_name": lead}
    said.set_prop(FLContextKey.JOB_META, meta, private=True, sticky=False)
    said.get_engine = lambda: engine
    return said


def test_many_refused_jobs_push_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rejected jobs of a lead push no earlier entries out of the log, neither at the server nor at a hospital.

    The log contains the lead's first rejected job, and at most once a minute the number of further rejected jobs. The
    first rejected job of another lead is logged at once.
    """
    monkeypatch.setattr(events, "LARGEST", 4000)
    for kit in (tmp_path / "server", tmp_path / "hospital"):
        (kit / "startup").mkdir(parents=True)
        (kit / "local").mkdir()
        write(kit, Event("joined", "connected", "north"))
    began = time.time()
    for number in range(150):
        KnownHospitals().handle_event(EventType.SUBMIT_JOB, job_of(tmp_path / "server", "eve@x.org", f"h{number}"))
        study = SiteEvents(tmp_path / "hospital", f"{number:032x}", f"study-{number}")
        study.lead, study.plan = "eve@x.org", "0123456789abcdef" * 4
        study.on_answer("has not approved this plan")
    KnownHospitals().handle_event(EventType.SUBMIT_JOB, job_of(tmp_path / "server", "lead@x.org", "south"))
    monkeypatch.setattr(events.time, "time", lambda: began + 2 * events.OFTEN)
    for kit, told in ((tmp_path / "server", 2), (tmp_path / "hospital", 1)):
        assert columns(kit, 2, 3)[0] == ("joined", "north") and len(columns(kit, 2)) == 1 + told
        events.tell_counts(kit)
        (number,) = [text for (text,) in columns(kit, 6)[1 + told :]]
        assert "149 more" in number and "eve@x.org" in number
        events.tell_counts(kit)
        assert len(columns(kit, 2)) == 2 + told


def test_a_party_that_is_refused_for_ever_new_reasons_pushes_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lead whose jobs are rejected all day does not fill the log, even if the reasons and the jobs' names change."""
    now = [1e9]
    monkeypatch.setattr(events.time, "time", lambda: now[0])
    for number in range(300):
        now[0] += 300.0
        reason = f"the job {'abcdefghij'[number % 10] * (1 + number // 10)} is refused"
        write(tmp_path, Event("refused", reason, by=f"lead {number if number % 2 else 0}"))
    assert (tmp_path / events.NAME).stat().st_size < events.LARGEST / 8 and not (tmp_path / "events.log.1").exists()


# ---------------------------------------------------------------------------------------- signatures of the log
def findings_of(home: Home, *more: str) -> list[str]:
    given = ["check", "--kit", str(home.folder), "--private", str(home.folder / "private.txt"), "--json", *more]
    with redirect_stdout(StringIO()) as out:
        main(given)
    found = json.loads(out.getvalue())["findings"]
    return [f"{one['severity']} {one['what']}" for one in found if one["where"] == "events"]


def told(home: Home, *texts: str) -> None:
    for text in texts:
        write(home.folder, Event("joined", text))


def test_a_changed_log_is_noticed(tmp_path: Path) -> None:
    """The check finds each changed, removed, moved or added line of a signed log, and a missing or forged signature."""
    home = Home(tmp_path / "kit")
    assert findings_of(home) == []
    chain = EventChain(home.kit)
    told(home, "a", "b", "c", "d")
    chain.sign()
    told(home, "e")
    (found,) = findings_of(home)
    assert found.startswith("ok")
    log, head = home.folder / events.NAME, home.folder / HEAD
    lines, signed = log.read_bytes().splitlines(keepends=True), head.read_bytes()
    other = Home(tmp_path / "other", "other")
    told(other, "a", "b")
    EventChain(other.kit).sign(accept=True)
    forged = (other.folder / HEAD).read_bytes()
    wrong = [lines[:1] + lines[2:], lines[1:], lines[:3], [], lines[:2] + lines[1:], lines[1::-1] + lines[2:]]
    wrong += [[line.replace(b"\tb\t", b"\tz\t") for line in lines], [lines[0].replace(b"\ta\t", b"\tz\t"), *lines[1:]]]
    for content, kept in [*((one, signed) for one in wrong), (lines, None), (lines, forged), (lines, signed[:-9])]:
        log.write_bytes(b"".join(content))
        head.unlink() if kept is None else head.write_bytes(kept)
        with pytest.raises(MedsiloError):
            chain.check()
        # processes refuse to sign a log that somebody has changed
        for process in (chain, EventChain(home.kit)):
            with pytest.raises(MedsiloError):
                process.sign()
    (found,) = findings_of(home)
    assert found.startswith("stops")
    assert findings_of(home, "--accept")[0].startswith("ok") and chain.check()


def test_a_chain_goes_on_when_files_are_set_aside_and_processes_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LARGEST", 1000)
    home = Home(tmp_path / "kit")
    chain, log = EventChain(home.kit), home.folder / events.NAME
    for number in range(60):
        told(home, f"event {number}")
        if number % 10 == 3:
            with log.open("ab") as file:
                file.write(b"2026-11-29 10:00:00Z\tINFO\tjoi" if number % 20 == 3 else b"\0\0\0\tINFO\n")
        chain.sign_in_time()
        assert chain.check(), number
    assert (home.folder / f"{events.NAME}.{events.KEPT}").exists()
    oldest = home.folder / f"{events.NAME}.{events.KEPT}"
    oldest.write_bytes(b"".join(oldest.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(MedsiloError, match="oldest"):
        chain.check()


@pytest.mark.parametrize("how", ["signal", "stop_fl.sh", "console"])
def test_a_kit_that_stops_signs_what_it_wrote(tmp_path: Path, how: str) -> None:
    """Whether a signal, NVFlare's stop script or the console stops a kit, the kit signs its log at the end."""
    home = Home(tmp_path / "kit")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _keep_a_kit(home, how, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read(1) == "."
    if how == "signal":
        os.kill(child, signal.SIGTERM)
    elif how == "stop_fl.sh":
        (home.folder / "shutdown.fl").touch()
    _, status = os.waitpid(child, 0)
    assert (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM) if how == "signal" else True
    lines = (home.folder / events.NAME).read_bytes().splitlines()
    assert json.loads((home.folder / HEAD).read_text())["content"]["last"] == hashlib.sha256(lines[-1]).hexdigest()
    assert EventChain(home.kit).check()


def _keep_a_kit(home: Home, how: str, ready: int) -> None:
    said = FLContext()
    said.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(home.folder)), private=True, sticky=False)
    keeper = EventKeeper.of(said, "client")
    told(home, "a")
    keeper.look()
    told(home, "b")
    os.write(ready, b".")
    if how == "console":
        own = HospitalEvents()
        own.keeper = keeper
        own.handle_event(EventType.SYSTEM_END, said)
    while how != "console" and not keeper.has_ended:
        keeper.look()
        time.sleep(0.01)


def test_a_full_disk_ends_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(events.LOG, "warning", lambda text, *rest: said.append(text % rest))
    (tmp_path / events.NAME).mkdir()
    write(tmp_path, Event("away", "north is gone"))
    assert len(said) == 1 and "can't be written" in said[0] and "north" in said[0]


def test_logs_shows_a_kits_events_and_those_of_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kits_of(tmp_path)
    kit = tmp_path / "kits/st-anna"

    def shown(*arguments: str) -> str:
        assert main(["logs", "--kit", str(kit), *arguments]) == 0
        return capsys.readouterr().out

    assert "nothing has happened" in shown()
    write(kit, Event("joined", "connected", "the server"))
    write(kit, Event("failed", "out of \x1b[31mmemory", "", "lungs", "job-1", needs_somebody=True))
    write(kit, Event("began", "FedAvg", "", "hearts", "job-2"))
    assert shown().count("\n") == 3
    assert all("WARNING" in shown(of) and "out of memory" in shown(of) for of in ("lungs", "job-1"))
    assert shown("job-1").count("\n") == 1 and "\x1b" not in shown()
    assert main(["logs", "--kit", str(tmp_path / "kits/lead@clinic.org")]) == 1
    assert "of a server or of a hospital" in capsys.readouterr().err


def test_following_goes_on_when_the_file_is_set_aside_or_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def rest(seconds: float) -> None:
        looked.set()
        time.sleep(0.01)

    monkeypatch.setattr(event_reading, "time", SimpleNamespace(sleep=rest))
    write(tmp_path, Event("joined", "before"))
    got, new = list[str](), event_reading.follow(tmp_path)
    reading = threading.Thread(target=lambda: got.extend(next(new).split("\t")[6] for _ in range(3)), daemon=True)
    reading.start()
    assert looked.wait(60)
    write(tmp_path, Event("back", "first"))
    (tmp_path / events.NAME).rename(tmp_path / "events.log.1")
    write(tmp_path, Event("back", "second"))
    wait_until(lambda: len(got) == 2, 60, "two lines")
    (tmp_path / events.NAME).write_text("")
    write(tmp_path, Event("back", "3"))
    reading.join(60)
    assert got == ["first", "second", "3"]


def test_following_begins_after_a_line_also_when_that_was_dropped(tmp_path: Path) -> None:
    lines = [Event("back", name).line(at) for at, name in ((1, "a"), (2, "b"), (2, "c"), (3, "d"))]
    (tmp_path / f"{events.NAME}.1").write_text("".join(f"{line}\n" for line in lines[:3]))
    (tmp_path / events.NAME).write_text(f"{lines[3]}\n")
    assert event_reading.since(tmp_path, lines[1]) == lines[2:] and event_reading.since(tmp_path, lines[3]) == []
    new = event_reading.follow(tmp_path, after=lines[2])
    assert next(new) == lines[3]
    write(tmp_path, Event("back", "e"))
    assert next(new).split("\t")[6] == "e"
    (tmp_path / f"{events.NAME}.1").unlink()
    assert event_reading.since(tmp_path, lines[0])[0] == lines[3]


def test_following_outlives_a_file_that_is_gone_while_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, Event("joined", "before"))
    new = event_reading.follow(tmp_path)
    looks = iter([None, FileNotFoundError(), PermissionError()])
    whole = Path.stat

    def stat(path: Path, **more: bool) -> os.stat_result:
        try:
            error = next(looks)
        except StopIteration:
            monkeypatch.setattr(Path, "stat", whole)
            write(tmp_path, Event("back", "now"))
        else:
            if error:
                raise error
        return whole(path, **more)

    monkeypatch.setattr(event_reading, "POLL", 0.0)
    monkeypatch.setattr(Path, "stat", stat)
    assert "now" in next(new)
