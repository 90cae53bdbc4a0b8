"""A watch program of a server or hospital sends one message at the start of an outage and one message at its end."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from medsilo.check.kit import OF_A_JOB
from medsilo.runs import events
from medsilo.runs.events import Event, write
from medsilo_lab.consortium import incidents
from medsilo_lab.consortium.incidents import Incidents, Message, News, news_of
from provisioning import metrics
from tests.conftest import mounted
from tests.secure.consortium import wait_until
from tests.unit.medsilo_lab.test_provision import kits_of

FIVE = ["a", "b", "c", "d", "e"]


class Clock:
    """Replace the clocks of the tested module by a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(incidents, "time", clock)
    return clock


class Told:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.incidents, self.got = clock, Incidents(), list[tuple[float, str]]()

    def happens(self, *what: Event | News) -> None:
        for one in what:
            news = one if isinstance(one, News) else news_of(one.line(self.clock.now))
            if news:
                self.incidents.take(news)

    def passes(self, seconds: float) -> list[str]:
        before = len(self.got)
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.got += [(self.clock.now, message.text) for message in self.incidents.due()]
        return [text for _, text in self.got[before:]]


@pytest.fixture
def told(clock: Clock) -> Told:
    return Told(clock)


def away(*names: str) -> list[Event]:
    return [Event("away", "its connection is gone for 11 s", name, needs_somebody=True) for name in names]


def down(clock: Clock) -> News:
    return News("localhost is not up: nothing listens", clock.now, begins="trouble down", about="localhost")


def up(clock: Clock) -> News:
    return News("over: localhost is not up: nothing listens", clock.now, ends="trouble down", about="localhost")


def test_a_line_that_is_cut_is_one_message_and_its_return_one(told: Told) -> None:
    told.happens(*away(*FIVE[:3]))
    told.passes(4)
    told.happens(*away(*FIVE[3:]))
    (text,) = told.passes(30)
    assert all(f"{name}" in text.rpartition(":")[2] for name in FIVE) and text.count("\n") == 0
    told.happens(*(Event("back", "connected", name) for name in FIVE[:2]))
    assert told.passes(5) == []
    told.happens(*(Event("back", "connected", name) for name in FIVE[2:]))
    (text,) = told.passes(30)
    assert text.startswith("medsilo: ") and "after 34 s" in text and all(f"{name}" in text for name in FIVE)
    assert told.passes(600) == [] and not told.incidents.open


def test_a_server_that_is_off_and_its_study_are_one_message_and_one(told: Told, clock: Clock) -> None:
    told.happens(down(clock))
    assert len(told.passes(20)) == 1
    told.happens(Event("started", "the server"))
    told.happens(Event("failed", "the server was ended; goes on in 10 s, 1 of 3", study="night", job="1"))
    told.happens(up(clock))
    told.happens(*(Event("joined", "connected", name) for name in FIVE))
    assert told.passes(40) == []
    told.happens(Event("resumed", "from round 7", study="night", job="2"))
    (text,) = told.passes(30)
    assert "after 20 s" in text and "a, b, c, d, e" in text and "night" in text
    assert told.passes(600) == [] and not told.incidents.open


def test_a_study_that_failed_and_goes_on_by_itself_says_both(told: Told) -> None:
    told.happens(Event("failed", "the disk is full", study="night", job="1", needs_somebody=True))
    told.passes(5)
    told.happens(Event("waits", "the disk is full; goes on in 10 s, 1 of 3", study="night", job="1"))
    (text,) = told.passes(20)
    assert "the disk is full; goes on in 10 s, 1 of 3" in text and "WARNING" not in text
    told.happens(Event("resumed", "from round 7", study="night", job="2"))
    assert len(told.passes(60)) == 1 and not told.incidents.open


def test_what_joins_an_outage_and_stays_is_told(told: Told, clock: Clock) -> None:
    told.happens(*away("a"))
    assert len(told.passes(20)) == 1
    told.happens(Event("failed", "too few hospitals", study="night", needs_somebody=True))
    (text,) = told.passes(40)
    assert "too few hospitals" in text
    told.happens(Event("back", "connected", "a"))
    (text,) = told.passes(40)
    assert "back" in text and "still" in text and "too few hospitals" in text
    told.happens(Event("resumed", "from round 7", study="night"))
    assert len(told.passes(40)) == 1 and not told.incidents.open


def test_a_part_that_is_back_is_told_within_half_a_minute(told: Told, clock: Clock) -> None:
    told.happens(*away("a", "b"))
    told.passes(20)
    told.happens(Event("back", "connected", "a"))
    at = clock.now
    (text,) = told.passes(40)
    assert " a: connected" in text and "still" in text and told.got[-1][0] - at <= 30
    assert told.passes(3600) == []


def test_two_outages_are_two(told: Told) -> None:
    told.happens(*away("a"))
    told.passes(100)
    told.happens(*away("b"))
    assert [len(told.passes(30)), len(told.got)] == [1, 2]


def test_an_outage_that_ends_at_once_is_one_message(told: Told) -> None:
    told.happens(*away("a"))
    told.passes(3)
    told.happens(Event("back", "connected", "a"))
    (text,) = told.passes(60)
    assert "after 3 s" in text and not told.incidents.open


def test_what_has_no_end_is_told_alone(told: Told) -> None:
    told.happens(Event("refused", "no certificate of ours", needs_somebody=True))
    assert len(told.passes(20)) == 1
    told.happens(Event("began", "FedAvg", study="night"), Event("joined", "connected", "a"))
    assert told.passes(20) == []
    told.happens(Event("ended", "finished", study="night"), Event("back", "its processes were started again", "a"))
    (text,) = told.passes(20)
    assert "finished" in text and "started again" in text and not told.incidents.open


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kits_of(tmp_path)
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    return tmp_path / "kits/localhost"


def watching(
    kit: Path, got: list[str], send: Callable[[str], None] | None = None, beside_server: bool = False
) -> metrics.Watch:
    return metrics.Watch(kit, 1e-9, metrics.Messages(send or got.append), beside_server)


def let(watch: metrics.Watch, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        watch.look()
        watch.messages.hand_over()


def test_watches_with_one_webhook_tell_an_outage_once(kit: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch programs of a server and a hospital share a webhook, and send one message for an outage that both see.

    A full disk at the hospital counts as a separate outage.
    """
    home, got = kit.with_name("hospital-a"), list[str]()
    both = [watching(kit, got), watching(home, got, beside_server=True)]
    wrong: dict[Path, metrics.Trouble] = {kit: {}, home: {}}
    for watch in both:
        monkeypatch.setattr(watch, "look_for", lambda own=watch.kit: wrong[own])
        monkeypatch.setattr(metrics, "LOOK", -1.0)

    def pass_by(seconds: int) -> list[str]:
        before = len(got)
        for _ in range(seconds):
            clock.now += 1
            for watch in both:
                watch.look()
                watch.messages.hand_over()
        return got[before:]

    pass_by(2)
    wrong[kit] = {("down", "localhost"): "localhost is not up"}
    wrong[home] = {("down", "hospital-a"): "hospital-a is not up", ("certificate", "hospital-a"): "it ends"}
    write(home, Event("away", "its connection is gone", "the server", needs_somebody=True))
    write(home, Event("failed", "its process was ended", study="lungs", job="job-1"))
    (begun,) = pass_by(30)
    wrong[kit] = wrong[home] = {}
    write(home, Event("back", "connected", "the server"))
    write(home, Event("resumed", "FedBN", study="lungs", job="job-1"))
    (over,) = pass_by(40)
    assert "localhost is not up" in begun and "over: " in over
    wrong[home] = {("disk", "hospital-a"): "0.0 GB are free"}
    write(home, Event("refused", "it may not bring code", needs_somebody=True))
    (own,) = pass_by(30)
    assert "0.0 GB" in own and "may not bring code" in own


def test_a_server_that_is_off_with_its_watch_is_reported_by_a_hospital(
    kit: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the hospital's watch program restarts during a long outage, no message about the outage is lost.

    A short absence of the server causes no message.
    """
    monkeypatch.setattr(metrics, "time", clock)
    home, got = kit.with_name("st-anna"), list[str]()
    watch = watching(home, got, beside_server=True)
    let(watch, clock, 2)
    write(home, Event("away", "its connection is gone", "the server", needs_somebody=True))
    let(watch, clock, 300)
    assert got == []
    watch = watching(home, got, beside_server=True)
    let(watch, clock, 620)
    (told,) = got
    assert "the server" in told and "connection is gone" in told
    write(home, Event("back", "connected", "the server"))
    let(watch, clock, 40)
    assert len(got) == 2 and "connected" in got[1]
    write(home, Event("away", "its connection is gone", "the server", needs_somebody=True))
    let(watch, clock, 300)
    write(home, Event("back", "connected", "the server"))
    let(watch, clock, 900)
    assert len(got) == 2


def test_a_watch_that_starts_again_repeats_and_forgets_nothing(kit: Path, clock: Clock) -> None:
    got = list[str]()

    def refuses(text: str) -> None:
        raise OSError

    watch = watching(kit, got)
    let(watch, clock, 2)
    write(kit, away("a")[0])
    let(watch, clock, 20)
    assert len(got) == 1
    watch = watching(kit, got)
    let(watch, clock, 20)
    assert len(got) == 1
    watch = watching(kit, got, refuses)
    let(watch, clock, 2)
    write(kit, Event("back", "connected", "a"))
    let(watch, clock, 40)
    watch = watching(kit, got)
    let(watch, clock, 2)
    assert len(got) == 2 and "back" in got[1]
    write(kit, away("b")[0])
    watch = watching(kit, got)
    let(watch, clock, 20)
    assert len(got) == 3 and " b: " in got[2] and not watch.incidents.open[0].over
    (kit / metrics.TOLD).write_text("damaged")
    let(watching(kit, got), clock, 20)
    assert len(got) == 3


def test_what_happened_while_nobody_looked_says_so(kit: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    got, line = list[str](), away("a")[0].line(time.time() - 1800)
    let(watching(kit, got), clock, 2)
    (kit / events.NAME).write_text(f"{line}\n")
    let(watching(kit, got), clock, 20)
    assert len(got) == 1 and "(told 30 min late)" in got[0]


@pytest.mark.slow
def test_a_full_disk_ends_no_watch(kit: Path, tmp_path: Path, clock: Clock) -> None:
    """The watch program reads events and sends messages even if the disk is full."""
    with mounted(tmp_path / "disk", "1m") as disk:
        kit, got = Path(shutil.copytree(kit, disk / "kit")), list[str]()
        write(kit, Event("began", "FedAvg", study="night"))
        watch = watching(kit, got)
        let(watch, clock, 2)
        write(kit, away("a")[0])
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while filler.write(b"x" * 512):
                pass
        let(watch, clock, 30)
        assert len(got) == 1 and " a: " in got[0]
        (disk / "filler").unlink()
        write(kit, Event("back", "connected", "a"))
        let(watch, clock, 30)
        assert len(got) == 2 and not json.loads((kit / metrics.TOLD).read_text())["open"]


@pytest.mark.slow
def test_a_full_disk_at_a_hospital_is_told_by_the_server_while_a_study_waits_for_it(
    kit: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a study waits for a hospital's full disk, only the server's watch program sends a message.

    If no study runs, the hospital's own watch program reports the full disk.
    """
    monkeypatch.setattr(metrics, "LOOK", -1.0)
    with mounted(tmp_path / "disk", "4m") as disk:
        home = Path(shutil.copytree(kit.with_name("st-anna"), disk / "kit"))
        (home / "medsilo").mkdir()
        job = [sys.executable, "-c", "import time; time.sleep(600)", OF_A_JOB[0], "-m", str(home)]
        got = list[str]()
        watch = metrics.Watch(home, 1e-3, metrics.Messages(got.append), beside_server=True)
        with subprocess.Popen(job) as process, (disk / "filler").open("wb", buffering=0) as filler:
            try:
                let(watch, clock, 3)
                with pytest.raises(OSError):
                    while filler.write(b"x" * 4096):
                        pass
                let(watch, clock, 30)
                assert got == []
            finally:
                process.kill()
        let(watch, clock, 30)
        assert len(got) == 1 and "GB are free" in got[0]


def test_work_goes_on_whatever_it_raises_and_one_that_hangs_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[int]()

    def work() -> None:
        done.append(1)
        if len(done) < 5:
            raise MemoryError
        if len(done) > 8:
            time.sleep(3600)

    running = metrics.Running("watch", work, 0.01, 600.0)
    wait_until(lambda: len(done) == 9, 60, "the work that hangs")
    assert running.trouble() is None
    later = time.monotonic() + 601.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: later)
    assert "watch" in str(running.trouble())


def test_messages_that_are_too_many_let_the_oldest_go(capsys: pytest.CaptureFixture[str]) -> None:
    messages = metrics.Messages(lambda text: None)
    for number in range(metrics.MOST + 1):
        messages.add(Message(f"message {number}", time.time()))
    assert len(messages.waiting) == metrics.MOST and messages.waiting[0].text == "message 1"
    assert "message 0" in capsys.readouterr().err


def test_a_hospital_that_is_slow_and_then_away_is_one_message_and_its_end_another(clock: Clock) -> None:
    """A hospital that is first slow and then absent causes one message at the start and one at the end."""
    told = Told(clock)
    told.happens(Event("slow", "round 70: no answer for 35 s", "a", "study", "job", True))
    assert told.passes(50) == []
    told.happens(Event("away", "it was silent for 90 s", "a", needs_somebody=True))
    (away,) = told.passes(15)
    told.happens(Event("back", "connected, after 18 s", "a"))
    told.happens(Event("slow", "round 70: answered after 101 s", "a", "study", "job"))
    (back,) = told.passes(60)
    assert "silent" in away and "connected" in back and "answered" not in back


def test_what_a_hospital_mends_itself_is_told_too(told: Told) -> None:
    """A restarted process and a renewed certificate each cause a single message.

    A long outage by a full disk causes one message at the start and one message at the end.
    """
    told.happens(Event("away", "its process died; it is started again", "a", "lungs", "job-1", needs_somebody=True))
    told.passes(3)
    told.happens(Event("back", "its process was started again", "a", "lungs", "job-1"))
    (text,) = told.passes(100)
    assert "its process died" in text and "over after 3 s" in text
    told.happens(
        Event(
            "refused",
            "the disk is full; the server asks it again by itself",
            "a",
            "lungs",
            "job-1",
            needs_somebody=True,
        )
    )
    (begun,) = told.passes(25)
    told.happens(Event("back", "it answers again", "a", "lungs", "job-1"))
    (over,) = told.passes(100)
    assert "the disk is full" in begun and "it answers again" in over and "after 25 s" in over
    told.happens(Event("certificate", "it was renewed, and ends on 2027-11-24", "a"))
    (renewed,) = told.passes(100)
    assert "a: it was renewed" in renewed
