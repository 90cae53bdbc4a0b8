"""events.log of a kit: what its processes write, how far it grows, and how `medsilo logs` shows it."""

import json
import os
import threading
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
from medsilo.flare import executor as executing
from medsilo.flare import kit_events
from medsilo.flare.executor import MedsiloExecutor, SiteEvents
from medsilo.flare.kit_events import GRACE, SETTLED, SILENCE, TWICE, Attendance, Seen, ServerEvents
from medsilo.flare.study_events import StudyEvents
from medsilo.runs import event_reading, events, paths
from medsilo.runs.events import Event, write
from tests.secure.consortium import wait_until
from tests.unit.test_provision import kits_of


def columns(kit: Path, *numbers: int) -> list[tuple[str, ...]]:
    return [tuple(line.split("\t")[number] for number in numbers) for line in event_reading.read(kit)]


def test_who_joins_goes_away_and_comes_back_is_told_once() -> None:
    attendance, told = Attendance(), list[tuple[str, str, bool]]()

    def look(now: float, **seen: Seen) -> None:
        told.extend((one.what, one.who, one.needs_somebody) for one in attendance.look(seen, now))

    for now in (0.0, 2.0):
        look(now, north=Seen(True, now), relayed=Seen(False, now))
    assert told == [("joined", "north", False), ("joined", "relayed", False)]
    told.clear()
    look(4.0, north=Seen(False, 2.0), relayed=Seen(False, 2.0))  # a connection that broke is often made again
    look(6.0, north=Seen(True, 2.0), relayed=Seen(False, 2.0))
    assert told == []
    for now in (8.0, 9.0 + GRACE, 10.0 + GRACE, 3.0 + SILENCE, 4.0 + SILENCE):
        look(now, north=Seen(False, 2.0), relayed=Seen(False, 2.0))
    assert told == [("away", "north", True), ("away", "relayed", True)]
    told.clear()
    look(200.0, north=Seen(True, 200.0), relayed=Seen(False, 200.0))
    look(202.0, north=Seen(True, 200.0, "another"))  # its new processes register
    look(204.0, north=Seen(True, 200.0, "another"))
    assert [what for what, *_ in told] == ["back", "back", "away"]
    look(270.0, north=Seen(True, 200.0, "a third"))
    assert told.pop() == ("back", "north", False)
    told.clear()
    for now in (272.0, 201.0 + SILENCE, 203.0 + SILENCE):  # its machine stands still, and no connection broke
        look(now, north=Seen(True, 200.0, "a third"))
    look(300.0, north=Seen(True, 300.0, "a third"))
    assert told == [("away", "north", True), ("back", "north", False)]


def test_a_clock_that_is_set_makes_nobody_away_and_hides_nobody() -> None:
    """last_heard is by NVFlare's clock, which somebody sets by two hours."""
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
        seen = {"north": Seen(connected, heard), "relayed": Seen(False, heard if now < 10 else 5008.0)}
        told.extend((one.what, one.who) for one in attendance.look(seen, now))
    assert told == [("joined", "north"), ("joined", "relayed"), ("away", "north")]
    assert [one.who for one in attendance.look(seen, 10.0 + SILENCE)] == ["relayed"]


def test_who_is_started_again_just_after_joining_is_back_once() -> None:
    attendance, told = Attendance(), list[str]()
    for now, token in ((0.0, "one"), (20.0, "two"), (22.0, "three"), (24.0 + SETTLED, "four")):
        told.extend(one.what for one in attendance.look({"north": Seen(True, now, token)}, now))
    assert told == ["joined", "back", "back"]


def test_a_study_tells_who_falls_out_and_is_back(tmp_path: Path) -> None:
    study = StudyEvents(tmp_path, "job-1", "lungs")
    for number, lost in enumerate((None, "lost: its connection was\nclosed", "lost: no answer", None), 1):
        study.on_round(number, {"a": None, "b": lost})
    found = columns(tmp_path, 1, 2, 3, 4, 5)
    assert found == [("WARNING", "away", "b", "lungs", "job-1"), ("INFO", "back", "b", "lungs", "job-1")]
    assert columns(tmp_path, 6) == [("round 2: lost: its connection was closed",), ("round 4",)]
    StudyEvents(None).tell("began", "in a simulation")


def test_a_site_that_is_asked_again_says_once_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk fails at another file each time, and may take one in between."""
    study, now = SiteEvents(tmp_path, "job-1", "lungs"), 0.0
    monkeypatch.setattr(executing.time, "monotonic", lambda: now)
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
    assert len(columns(tmp_path, 1)) == 3  # it never answered
    now *= 3
    study.on_answer()
    study.on_answer("state-44.safetensors could not be written: the disk is full", passing=True)
    level, what, text = columns(tmp_path, 1, 2, 6)[3]
    assert (level, what, text.split()[0]) == ("WARNING", "refused", "state-44.safetensors")


def test_a_server_that_provokes_many_errors_does_not_fill_the_log(tmp_path: Path) -> None:
    """Else it could push out the evidence of what was asked before."""
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
        executor.folder = tmp_path / f"site-{answered}"  # whose diary the hospital's page shows
        executor.handle_event(EventType.END_RUN, FLContext())  # of a job that it refused
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
        """Whether the server takes a process in that it did not know."""
        now[0], said = at, FLContext()
        said.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path)), private=True, sticky=False)
        monkeypatch.setattr(said, "get_engine", lambda: engine)
        new = known.heartbeat(token, "north", "north", said)
        own.handle_event(EventType.CLIENT_HEARTBEAT_PROCESSED, said)
        return new

    assert heartbeat("second", 0.0)
    own.attendance.there["north"] = True
    assert not any(heartbeat("first", at) for at in (1.0, 11.0))
    assert not any(heartbeat("first", at) for at in range(100, 100 + int(TWICE)))  # it was another day
    assert columns(tmp_path, 1, 2) == []
    assert not any(heartbeat("first", 105.0 + TWICE + at) for at in range(9))
    ((level, what, text),) = columns(tmp_path, 1, 2, 6)
    assert (level, what) == ("WARNING", "refused") and "kit of north" in text
    own.attendance.there["north"] = False  # the second one is silent
    assert not heartbeat("first", 200.0) and heartbeat("first", 210.0)


def _write_many(kit: str, number: int) -> None:
    for event in range(100):
        write(Path(kit), Event("back", f"{number} {event} " + "x" * 100))


def test_processes_write_one_after_the_other_and_the_file_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LARGEST", 4000)
    fork = get_context("fork")  # as the files are small here
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
    assert len(lines) > 50 and all(line.count("\t") == 6 and line.endswith("x" * 100) for line in lines)
    for number in range(3):  # what is left is the newest, in order
        own = [int(words[1]) for line in lines if (words := line.split("\t")[6].split())[0] == str(number)]
        assert own == sorted(own)


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
    monkeypatch.setattr(event_reading, "POLL", 0.01)
    write(tmp_path, Event("joined", "before"))
    got, new = list[str](), event_reading.follow(tmp_path)
    reading = threading.Thread(target=lambda: got.extend(next(new).split("\t")[6] for _ in range(3)), daemon=True)
    reading.start()
    reading.join(0.2)
    write(tmp_path, Event("back", "first"))
    (tmp_path / events.NAME).rename(tmp_path / "events.log.1")
    write(tmp_path, Event("back", "second"))
    wait_until(lambda: len(got) == 2, 10, "two lines")
    (tmp_path / events.NAME).write_text("")
    write(tmp_path, Event("back", "3"))
    reading.join(10)
    assert got == ["first", "second", "3"]


def test_following_begins_after_a_line_also_when_that_was_dropped(tmp_path: Path) -> None:
    lines = [Event("back", name).line(at) for at, name in ((1, "a"), (2, "b"), (2, "c"), (3, "d"))]
    (tmp_path / f"{events.NAME}.1").write_text("".join(f"{line}\n" for line in lines[:3]))
    (tmp_path / events.NAME).write_text(f"{lines[3]}\n")
    assert event_reading.since(tmp_path, lines[1]) == lines[2:] and event_reading.since(tmp_path, lines[3]) == []
    new = event_reading.follow(tmp_path, after=lines[2])
    assert next(new) == lines[3]
    write(tmp_path, Event("back", "e"))
    assert next(new).endswith("\te")
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
