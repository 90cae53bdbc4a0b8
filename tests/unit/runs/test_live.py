"""A person who watches a study sees the state of each site, and sees progress at short intervals."""

import http.client
import http.cookiejar
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from psutil import CONN_LISTEN, Process

from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.federation import site_state
from medsilo.runs import paths
from medsilo.runs.own_files import SiteActivity
from medsilo.runs.progress import Moment, StudyProgress, listed, read_now
from medsilo.runs.reading import read_rounds
from medsilo.runs.rounds import Progress, RequestStatus, Round, SiteRound, SiteTurn
from medsilo_lab.engines import inprocess
from medsilo_server.requests import ByteCounter
from tests.conftest import make_plan
from tests.secure.consortium import wait_until

SITES = ["a", "b", "c", "d"]

NOBODY: Any = None


def a_round(number: int, **seconds: float) -> Round:
    sites = {
        site: SiteRound(validation=0.5 + number / 10, train_loss=0.2, seconds=own) for site, own in seconds.items()
    }
    return Round(round=number, asked=list(seconds), answered=list(seconds), sites=sites)


def turns(number: int, **sites: tuple[float | None, float | None]) -> RequestStatus:
    own = {site: SiteTurn(asked=asked, answered=answered) for site, (asked, answered) in sites.items()}
    return RequestStatus(task="round", round=number, at=0.0, sites=own)


def working(deed: Any, share: float | None = None) -> SiteActivity:
    return SiteActivity(task="round", round=2, at=0.0, deed=deed, share=share)


def test_each_site_has_a_state_between_two_rounds() -> None:
    moment = Moment()
    time = iter([0.0, 8.0, 30.0, 42.0])
    progress = StudyProgress(SITES, 5, "dice", lambda: next(time, 42.0), lambda: moment)
    assert progress.sentence() == "still starting, 8 s so far"
    progress.add(a_round(1, a=30.0, b=30.0, c=30.0, d=30.0))
    assert progress.sentence() == "round 1 of 5 ended 12 s ago"
    now = turns(2, a=(50.0, None), b=(20.0, None), c=(40.0, 22.0), d=(None, None))
    moment = Moment(now, {"a": working("training", 0.34), "b": working("sending")}, age=37.0)
    assert progress.now() == {
        # site a has waited for 50 + 37 seconds, and counts as late after 1.5 times the usual 30 seconds
        "a": "training 34 %, late by 42 s",
        "b": "sending, late by 12 s",
        "c": "answered",
        "d": "waiting",
    }
    assert progress.sentence().startswith("round 2 of 5: a training 34 %, late by 42 s, b sending")
    # a lead who is connected over TLS sees all states of sites except a rejection
    moment = Moment(now, {"b": working("refused")})
    assert [progress.now()[site] for site in "ab"] == ["asked 50 s ago, late by 5 s", "refused"]
    progress.add(a_round(2, a=30.0, b=30.0, c=30.0, d=30.0))
    # all sites have ended their progress reports of the previous round
    assert set(progress.now().values()) == {"answered"}


def test_in_the_first_round_who_answered_says_who_is_late() -> None:
    moment = Moment(turns(1, a=(20.0, None), b=(20.0, 8.0)))
    progress = StudyProgress(["a", "b"], 5, "dice", look=lambda: moment)
    assert progress.now() == {"a": "asked 20 s ago, late by 8 s", "b": "answered"}
    moment = Moment(turns(1, a=(20.0, None), b=(20.0, None)))
    assert progress.now() == dict.fromkeys("ab", "asked 20 s ago")


def test_many_sites_are_counted() -> None:
    assert listed({"a": "answered", "b": "waiting"}) == "b waiting, a answered"
    many = {f"s{n}": "waiting" for n in range(7)} | {f"t{n}": "answered" for n in range(9)}
    assert listed(many) == "s0 waiting, s1 waiting, s2 waiting, s3 waiting, s4 waiting, 2 others, 9 answered"


def test_the_time_left_grows_shorter_inside_a_round() -> None:
    now = [0.0]
    progress = StudyProgress(["a"], 4, "dice", lambda: now[0])
    for number in (1, 2):
        now[0] += 10
        progress.add(a_round(number, a=1.0))
    left = []
    for seconds in (0, 4, 6, 50):
        now[0] = 20 + seconds
        left.append(progress.seconds_left())
    assert left == [20, 16, 14, 10]  # the usual time of a round excludes the last round, which took very long


def test_rounds_that_were_over_before_anybody_looked_took_their_own_time() -> None:
    progress = StudyProgress(["a"], 12, "dice", lambda: 0.0)
    # the program reads all finished rounds of a resumed study at the same moment
    for number, seconds in ((1, 20.0), (2, 8.0), (3, 10.0), (4, 12.0)):
        progress.add(a_round(number, a=1.0).model_copy(update={"seconds": seconds}))
    assert progress.seconds_left() == 10 * 8


def test_turns_are_told_at_every_change_and_with_many_sites_seldom() -> None:
    told: list[RequestStatus | None] = []
    now = [100.0]
    keeper = ByteCounter(NOBODY, told.append, lambda: now[0])
    assert keeper.now() is None
    keeper.begin("round", 3, ["a", "b"])
    now[0] += 5
    keeper.asked("a")
    now[0] += 2
    keeper.answered("a")
    assert [len(one.sites) for one in told if one] == [2, 2, 2]
    last = keeper.now()
    assert last and last.sites == {"a": SiteTurn(asked=2.0, answered=2.0), "b": SiteTurn()}
    keeper.end()
    assert told[-1] is None and keeper.now() is None
    told.clear()
    keeper.begin("round", 4, [f"s{n}" for n in range(4000)])
    for n in range(4000):
        keeper.asked(f"s{n}")
    assert len(told) == 1  # the clock has not advanced between the requests


def test_the_lead_is_told_nothing_that_only_a_site_knows() -> None:
    """The server sends the lead only times that the server itself has measured."""
    keeper = ByteCounter(NOBODY)
    keeper.begin("round", 1, ["a"])
    told = Progress(planned=1, metric="dice", turns=keeper.now()).as_json()
    assert set(told["turns"]) == {"task", "round", "at", "sites"} and told["turns"]["sites"]["a"].keys() == {
        "asked",
        "answered",
    }
    assert Progress(planned=1, metric="dice").as_json()["turns"] is None


def test_a_site_says_how_far_its_training_is(tmp_path: Path) -> None:
    now = [0.0]
    own = site_state.StatusFile(tmp_path, lambda: now[0])
    seen = []
    with own.answering("round", 2):
        own.begin("training", 4)
        for _ in range(4):
            now[0] += 0.2
            own.step()
            seen.append(told.share if (told := read_now(SiteActivity, tmp_path)) else None)
    assert seen == [None, 0.25, 0.25, 0.75]  # a site writes at most four reports per second
    last = read_now(SiteActivity, tmp_path)
    assert last and (last.task, last.round, last.deed, last.share) == ("round", 2, "sending", None)
    with pytest.raises(MedsiloError), own.answering("round", 3):
        raise MedsiloError("no")
    last = read_now(SiteActivity, tmp_path)
    assert last and last.deed == "refused"
    with own.answering("test", 3):
        pass
    assert read_now(SiteActivity, tmp_path) is None
    with own.answering("round", 4):
        own.begin("training", 4)
        own.step()
    assert read_now(SiteActivity, tmp_path) is None  # a site that answers quickly writes no report


def test_a_study_on_this_machine_shows_who_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sites' progress files show which site trains, in the words that the command line prints."""
    monkeypatch.setattr(site_state, "PAUSE", 0.0)
    small = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16"]
    plan = make_plan("fedavg", "training.rounds=2", "training.local_epochs=6", *small)
    progress = StudyProgress(
        plan.participation.sites, plan.rounds, plan.task.goal.metric, look=lambda: Moment.of_run(folder)
    )
    folder, seen, tell = tmp_path / "run", set[str](), site_state.StatusFile._tell

    def watched(report: site_state.StatusFile) -> None:
        tell(report)
        seen.update(progress.now().values())

    monkeypatch.setattr(site_state.StatusFile, "_tell", watched)
    inprocess.run(plan, folder=folder, on_round=progress.add)
    assert any(re.fullmatch(r"training \d+ %", state) for state in seen), seen
    assert {"waiting", "answered"} <= seen
    assert read_now(RequestStatus, folder) is None and not list(folder.rglob(paths.NOW))


# ---------------------------------------------------------------------------------------------------- silence
@pytest.mark.slow
def test_a_command_that_has_begun_is_never_silent_for_long(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def told(out: str, err: str = "(.*\n)*") -> None:
        said = ["", ""]

        def matches() -> bool:
            said[:] = [before + new for before, new in zip(said, capsys.readouterr(), strict=True)]
            return all(re.fullmatch(pattern, text) for pattern, text in zip((out, err), said, strict=True))

        wait_until(matches, 600, f"{out} and {err}")

    screen = Console(silence=0.3)
    time.sleep(0.6)
    assert capsys.readouterr().out == ""  # a command without training prints only its results
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen.note("reading the model")  # a terminal shows the note, but a pipe receives only results
    told("", r"reading the model \.\.\.\n(reading the model \(\d+ s\)\n)+")
    screen.begin("reading the plan")
    told(r"reading the plan\n(reading the plan \(\d+ s\)\n)+")
    screen.doing(lambda: "round 3 of 12: a training 34 %")
    told(r"(reading the plan \(\d+ s\)\n)*(round 3 of 12: a training 34 %\n)+")
    screen.end()
    capsys.readouterr()
    time.sleep(0.5)
    assert capsys.readouterr().out == ""
    with screen.busy("comparing") as tell_more:
        tell_more(lambda: "fedavg, seed 0 (round 1 of 3 ended)")
        assert screen._doing and re.fullmatch(
            r"comparing: fedavg, seed 0 \(round 1 of 3 ended\) \(\d+ s\)", screen._doing()
        )


# ------------------------------------------------------------------------------------------------ the live web page
def listening(pid: int) -> list[Any]:
    family = [Process(pid), *Process(pid).children(recursive=True)]
    return [line.laddr for one in family for line in one.net_connections("tcp") if line.status == CONN_LISTEN]


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
def test_a_run_is_watched_and_stopped_on_a_page_of_its_own(live: bool, root: Path, tmp_path: Path) -> None:
    """Without the option --live, the command opens no port."""
    small = [f"--set={change}" for change in ("task.patients=4", "task.patches=4", "training.rounds=5000")]
    command = [sys.executable, "-m", "medsilo", "run", str(root / "jobs/fedavg"), *small, "--engine", "inprocess"]
    command += ["-o", str(tmp_path), "--name", "watched", *(["--live"] if live else [])]
    # a shell's background processes and their children ignore the interrupt signal
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    try:
        assert process.stdout
        rounds = tmp_path / "watched" / paths.ROUNDS
        if not live:
            wait_until(lambda: rounds.exists() and len(read_rounds(rounds.parent, growing=True)) > 1, 600, "two rounds")
            assert listening(process.pid) == []
            process.send_signal(signal.SIGINT)
        else:
            starts = (re.search(r"(http://\S+/)start\?token=\S+", line) for line in process.stdout)
            address = next(found for found in starts if found)
            assert [one.ip for one in listening(process.pid)] == ["127.0.0.1"]
            jar = http.cookiejar.CookieJar()
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
            base = re.search(r'url=/([^"]+)/"', browser.open(address[0], timeout=60).read().decode())[1]  # type: ignore[index]
            page = f"{address[1]}{base}/"

            def shown() -> str:
                return browser.open(page, timeout=60).read().decode()

            wait_until(lambda: shown().count('<tr><th scope="row">') >= 3, 600, "three rounds")
            text = shown()
            assert 'class="chart"' in text and all(f"hospital-{name}" in text for name in "abc")
            assert re.findall(r'(?:src|href)="(?!data:|/|#)[^"]*"', text) == []
            word = re.search(r'name="word" value="([^"]+)"', text)[1]  # type: ignore[index]
            stop = urllib.request.Request(f"{page}stop", b"word=x", {"Origin": address[1].rstrip("/")})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                browser.open(stop, timeout=60)
            stop = urllib.request.Request(f"{page}stop", f"word={word}".encode(), {"Origin": address[1].rstrip("/")})
            with suppress(OSError, http.client.HTTPException):  # the page's server stops when the run ends
                browser.open(stop, timeout=60)
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 130 and "medsilo resume" in said
    finally:
        process.kill()
        process.wait()
