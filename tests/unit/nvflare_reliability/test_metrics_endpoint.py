"""Test the metrics of a server and of a hospital, a probe, and messages about absent parties."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from medsilo.check.kit import read_kit, trouble
from medsilo.federation.account import ledger_of
from medsilo.runs.events import Event, write
from medsilo.site.ledger import CountedStudy
from medsilo.site.query_budget import QueryBudget
from medsilo_lab.consortium.incidents import Message
from medsilo_lab.engines import inprocess
from provisioning import metrics
from tests.conftest import SITES, make_plan, mounted, over_all, pace
from tests.secure.consortium import free_port, wait_until
from tests.sites import CPU
from tests.unit.medsilo_lab.test_consortium import put
from tests.unit.medsilo_lab.test_provision import kits_of
from tests.unit.site.test_approvals import make_kit
from tests.unit.site.test_ledger import DATA, DELTA, DEMANDS, ONE, ROUND, cost

LINE = re.compile(r'medsilo_([a-z_]+)(?:\{(?:[a-z]+="[^"]*",?)*\})? -?[0-9.e+-]+')


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    kits_of(folder, put("server", "port", free_port()))
    run = folder / "kits/localhost/medsilo/study"
    inprocess.run(make_plan("fedavg", "training.rounds=2"), folder=run, settings=CPU)
    return folder / "kits"


def told(kit: Path) -> dict[str, float]:
    text = metrics.as_text(metrics.samples(kit))
    lines = [line for line in text.splitlines() if line[0] != "#"]
    assert all(LINE.fullmatch(line) for line in lines), text
    assert {match[1] for line in lines if (match := LINE.fullmatch(line))} <= metrics.HELP.keys()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_server_tells_rounds_bytes_and_who_missed(kits: Path) -> None:
    kit, path = kits / "localhost", kits / "localhost/medsilo/study/rounds.jsonl"
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    numbers = told(kit)
    own, site = 'study="study"', f'site="{SITES[1]}",study="study"'
    assert numbers['medsilo_up{party="localhost"}'] == 0 and numbers[f"medsilo_rounds{{{own}}}"] == 2
    assert numbers[f'medsilo_studies{{state="finished",{own}}}'] == 1 and numbers["medsilo_disk_free_bytes"] > 0
    assert numbers[f"medsilo_site_answered_rounds{{{site}}}"] == 2 == numbers[f"medsilo_site_round{{{site}}}"]
    sent = sum(line["sites"][SITES[1]]["bytes_up"] for line in rounds)
    assert numbers[f'medsilo_site_bytes{{direction="up",{site}}}'] == sent > 0
    before = path.read_text()
    lost = rounds[1] | {"round": 3, "answered": [], "lost": {SITES[1]: "no answer"}}
    lost["sites"].pop(SITES[1])
    try:
        path.write_text(before + json.dumps(lost) + "\n")
        assert told(kit)[f"medsilo_site_missed_rounds{{{site}}}"] == 1
        path.write_text("damaged\n")
        assert told(kit)["medsilo_unreadable"] == 1
    finally:
        path.write_text(before)


def test_a_look_asks_all_processes_no_more_often_for_more_hospitals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits_of(tmp_path)
    kit, asked = tmp_path / "kits/localhost", list[str]()
    for number in range(20):
        write(kit, Event("joined", "connected", f"h-{number}"))
    monkeypatch.setattr(metrics, "trouble", lambda party: asked.append(party.name))
    assert sum(name == "site_connected" for name, *_ in metrics.samples(kit)) == 20
    assert len(asked) <= 2


def test_a_party_is_up_by_the_connection_of_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of another party, an unfinished job, or a status request does not show that a party is up."""
    kits_of(tmp_path)
    kits, asked = tmp_path / "kits", list[str]()
    program = "nvflare.private.fed.app"

    def process(what: str, *words: str) -> Any:
        line = SimpleNamespace(status="ESTABLISHED", raddr=SimpleNamespace(port=8002))
        ask = lambda kind: asked.append(what) or [line]  # noqa: E731
        return SimpleNamespace(
            info={"cmdline": ["python", "-m", *words]}, net_connections=ask, cwd=lambda: str(tmp_path / "kits")
        )

    party = read_kit(kits / "north")
    others = [
        process("another party", f"{program}.client.client_train", "-m", str(kits / "north-two/startup/..")),
        process("its job", f"{program}.client.worker_process", "-m", str(kits / "north/startup/..")),
        process("a person", "medsilo", "status", "--kit", str(kits / "north")),
    ]
    own = process("north", f"{program}.client.client_train", "-m", str(kits / "north/startup/.."))
    monkeypatch.setattr(psutil, "process_iter", lambda names: iter(others))
    assert trouble(party) == "no connection to the server on port 8002" and asked == []
    monkeypatch.setattr(psutil, "process_iter", lambda names: iter([*others, own]))
    assert trouble(party) is None
    assert asked == ["north"]


@pytest.fixture
def led(kits: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    kit, job = kits / "localhost", str(uuid.uuid4())
    run = shutil.copytree(kit / "medsilo/study", kit / "medsilo/led")
    for name in ("summary.json", "status.json"):
        (run / name).unlink(missing_ok=True)
    (run / "jobs.txt").write_text(f"{job}\n")
    leads = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", job])
    yield run, leads
    leads.kill()
    leads.wait()
    shutil.rmtree(run)


def test_a_study_runs_while_its_job_does_and_every_site_has_a_time(led: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """The metrics show a running study before its first round, and between two rounds."""
    run, leads = led
    kit, text = run.parents[1], (run / "rounds.jsonl").read_text()

    def heard() -> dict[str, float]:
        numbers = told(kit)
        assert numbers['medsilo_studies{state="running",study="led"}'] == 1
        return {site: numbers[f'medsilo_site_heard_timestamp_seconds{{site="{site}",study="led"}}'] for site in SITES}

    at = (run / "rounds.jsonl").stat().st_mtime
    assert set(heard().values()) == {at}
    sites = {site: {"asked": 5.0, "answered": None} for site in SITES} | {SITES[0]: {"asked": 5.0, "answered": 2.0}}
    (run / "status.json").write_text(json.dumps({"task": "round", "round": 3, "at": at + 10, "sites": sites}))
    assert heard() == {SITES[0]: at + 7} | dict.fromkeys(SITES[1:], at)
    (run / "rounds.jsonl").unlink()
    assert heard()[SITES[1]] == at + 5
    (run / "rounds.jsonl").write_text(text)
    leads.kill()
    leads.wait()
    assert told(kit)['medsilo_studies{state="stopped",study="led"}'] == 1
    summary = json.loads((run.parent / "study/summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"status": "failed", "reason": "was aborted"}))
    for what, needs_somebody, state in (
        ("failed", True, "failed"),
        ("failed", False, "waits"),  # the study resumes automatically, and messages inform the lead and the webhook
        ("waits", False, "waits"),
        ("ended", False, "cancelled"),  # a decision of the lead causes no message
    ):
        write(kit, Event(what, "", "", "led", (run / "jobs.txt").read_text().strip(), needs_somebody))
        assert told(kit)[f'medsilo_studies{{state="{state}",study="led"}}'] == 1
    (kit / "events.log").unlink()


def test_who_is_connected_is_a_number(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = kits / "localhost"
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    write(kit, Event("joined", "connected", "gone"))
    write(kit, Event("started", "the server"))
    for what, who, study in (
        ("joined", "north", ""),
        ("joined", "south", ""),
        ("away", "north", ""),
        ("away", "south", "led"),
    ):
        write(kit, Event(what, "", who, study))
    try:
        found = {site: told(kit)[f'medsilo_site_connected{{site="{site}"}}'] for site in ("gone", "north", "south")}
        assert found == {"gone": 0, "north": 0, "south": 1}
        monkeypatch.setattr(metrics, "trouble", lambda party: "nothing listens")
        assert told(kit)['medsilo_site_connected{site="south"}'] == 0
    finally:
        (kit / "events.log").unlink()


def test_what_needs_somebody_is_found(
    led: tuple[Path, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = led
    kit, now = run.parents[1], time.time()
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    assert metrics.troubles(kit, 1e-9) == {} and set(metrics.troubles(kit, 1e9)) == {("disk", "localhost")}
    assert set(metrics.troubles(kit, 1e-9, now + 500)) == set()
    assert set(metrics.troubles(kit, 1e-9, now + 700)) == {("standstill", "led")}
    lines = [json.loads(line) | {"seconds": 300.0} for line in (run / "rounds.jsonl").read_text().splitlines()]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert set(metrics.troubles(kit, 1e-9, now + 1400)) == set()
    assert set(metrics.troubles(kit, 1e-9, now + 1600)) == {("standstill", "led")}
    assert set(metrics.troubles(kit, 1e-9, now - 3600)) == {("clock", "localhost")}
    assert ("certificate", "localhost") in metrics.troubles(kit, 1e-9, now + 340 * 86_400)
    monkeypatch.setattr(metrics, "trouble", lambda party: "nothing listens")
    assert set(metrics.troubles(kit, 1e-9)) == {("down", "localhost")}


def test_a_hospital_tells_what_waits(kits: Path) -> None:
    numbers = told(kits / "st-anna")
    assert numbers["medsilo_approvals_waiting"] == 0 == numbers["medsilo_unreadable"]


def test_a_hospital_tells_what_is_left_of_its_epsilon(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    ledger = ledger_of(QueryBudget(kit / "medsilo/_hospital/a"), DATA, make_kit(kit, "a"))
    ledger.charge(CountedStudy(ONE, DEMANDS), "round 1", "attempt", ROUND)
    settings = kit / "local/medsilo.yaml"
    settings.write_text("")
    assert not [name for name in told(kit) if "epsilon_left" in name]
    settings.write_text(f"privacy: {{epsilon: 90, delta: {DELTA}}}\n")
    (left,) = (value for name, value in told(kit).items() if "epsilon_left" in name)
    assert left == pytest.approx(90 - cost(1))


class Hook(BaseHTTPRequestHandler):
    got: ClassVar[list[dict[str, str]]] = []
    answers: ClassVar[list[int]] = []  # status codes of the next answers; 0 means that the server closes the connection

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.answers.pop(0) if self.answers else 204
        if answer:
            self.send_response(answer)
            self.send_header("Location", "/internal")
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    Hook.got, Hook.answers = [], []
    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", Hook.got
    server.shutdown()


def test_a_webhook_gets_each_line_in_order_when_it_answers_again(
    hook: tuple[str, list[dict[str, str]]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The webhook's server rejects or redirects a request, or closes the connection without an answer."""
    monkeypatch.setattr(metrics, "PAUSE", 0.01)
    url, got = hook
    messages = metrics.Messages(partial(metrics.post, url))
    Hook.answers.extend([500, 302, 404])
    messages.add(Message("north fell out", time.time()))
    messages.add(Message("north is back", time.time()))
    metrics.Running("webhook", messages.hand_over, 0.01, 60)
    wait_until(lambda: len(got) >= 5, 600, "both messages")
    assert got == [{"text": "north fell out"}] * 4 + [{"text": "north is back"}]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'north fell out'" in said and "500" in said
    Hook.answers.extend([0, 0, 0])  # the webhook's server may have accepted the message in each attempt
    messages.add(Message("south fell out", time.time()))
    messages.add(Message("south is back", time.time() - 3600))
    wait_until(lambda: len(got) >= 9, 600, "both messages")
    late = {"text": "south is back (told 60 min late)"}
    assert got[5:] == [{"text": "south fell out"}] * 3 + [late]


def test_however_many_ask_one_looks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FRESH", 600.0)
    looks = list[int]()

    def look() -> int:
        looks.append(len(looks))
        time.sleep(0.05)
        return len(looks)

    fresh, found = metrics.Fresh(look), list[int]()
    asking = [Thread(target=lambda: found.append(fresh())) for _ in range(100)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert looks == [0] and found == [1] * 100


def test_a_full_disk_for_temporary_files_is_told(kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose disk for temporary files is full cannot accept a job."""
    kit, full = kits / "localhost", tmp_path / "full"
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    with mounted(full, "1m"):
        command = [sys.executable, "-c", "import time; time.sleep(600)", str(kit.resolve())]
        own = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(full)})
        try:
            wait_until(lambda: full in metrics.Processes.of(kit).temporary(), 600, "its folder")
            assert set(metrics.troubles(kit, 0.01)) == set()
            (full / "jobs").write_bytes(b"x" * 1_000_000)
            assert str(full) in metrics.troubles(kit, 0.01)["disk", "localhost"]
        finally:
            own.kill()
            own.wait()


def test_events_that_cannot_be_written_are_told(kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the message about unwritable events were missing, nobody would learn why the webhook gets no messages."""
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    with mounted(tmp_path / "disk", "1m") as disk:
        kit = Path(shutil.copytree(kits / "localhost", disk / "kit"))
        write(kit, Event("joined", "connected", "north"))
        assert set(metrics.troubles(kit, 1e-9)) == set()
        (disk / "jobs").write_bytes(b"x" * 1000 * (shutil.disk_usage(disk).free // 1000))
        assert set(metrics.troubles(kit, 0.01)) == {("disk", "localhost")}
        (disk / "jobs").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert set(metrics.troubles(kit, 1e-9)) == {("events", "localhost")}


@pytest.mark.slow
def test_the_program_serves_this_machine_alone_and_tells(
    kits: Path, root: Path, hook: tuple[str, list[dict[str, str]]]
) -> None:
    def start(*arguments: str, url: str = "") -> subprocess.Popen[str]:
        command, own = [sys.executable, "provisioning/metrics.py", *arguments], {**os.environ, "MEDSILO_WEBHOOK": url}
        return subprocess.Popen(command, cwd=root, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(program: subprocess.Popen[str]) -> None:
        program.terminate()
        program.communicate()

    wrong = start(str(kits / "localhost"), url="http://elsewhere.org/hook")
    assert "https://" in wrong.communicate(timeout=600)[1] and wrong.returncode == 1
    address, got = hook
    kit = kits / "localhost"
    running = start(str(kit), "--port", "0", "--disk", "1e9", url=address)
    try:
        assert running.stdout
        url = running.stdout.readline().split()[1].removesuffix("/metrics")
        assert url.startswith("http://127.0.0.1:")
        wait_until((kit / metrics.TOLD).exists, 600, "the watch")
        write(kit, Event("began", "FedAvg", "", "lungs"))
        write(kit, Event("failed", "out of memory", "", "lungs", needs_somebody=True))
        assert b'medsilo_rounds{study="study"} 2.0' in urllib.request.urlopen(f"{url}/metrics", timeout=30).read()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/healthz", timeout=30)
        wait_until(lambda: bool(got), 600, "the message")
        text = got[0]["text"]
        assert all(words in text for words in ("is not up", "are free", "out of memory")) and "began" not in text
        assert len(got) == 1
        wait_until(
            lambda: not json.loads((kit / metrics.TOLD).read_text())["waiting"], 600, "the note of what was told"
        )
        end(running)
        write(kit, Event("failed", "no disk", "", "lungs", needs_somebody=True))
        running = start(str(kit), "--port", "0", url=address)
        wait_until(lambda: any("no disk" in message["text"] for message in got), 600, "what was missed")
        assert sum("out of memory" in message["text"] for message in got) == 1
    finally:
        end(running)
        (kit / "events.log").unlink(missing_ok=True)
        (kit / metrics.TOLD).unlink(missing_ok=True)


def test_the_dashboard_asks_for_what_is_told(root: Path) -> None:
    board = json.loads((root / "provisioning/grafana.json").read_text())
    asked = {name for one in board["panels"] for name in re.findall(r"medsilo_([a-z_]+)", one["targets"][0]["expr"])}
    assert asked and asked <= metrics.HELP.keys()


RULE = re.compile(r'medsilo_([a-z_]+)(?:\{([a-z]+)="([a-z]+)"\})? == ([01])')
FIRES = {
    "MedsiloDown": [("trouble", {"what": "down", "about": "x"}, 1)],
    "MedsiloStudyFailed": [("studies", {"study": "x", "state": "failed"}, 1)],
    "MedsiloStudyStopped": [("studies", {"study": "x", "state": "stopped"}, 1)],
    "MedsiloStandstill": [("trouble", {"what": "standstill", "about": "x"}, 1)],
    "MedsiloHospitalAway": [("site_connected", {"site": "x"}, 0)],
    "MedsiloCertificate": [("trouble", {"what": "certificate", "about": "x"}, 1)],
    "MedsiloDisk": [("trouble", {"what": "disk", "about": "x"}, 1)],
    "MedsiloEvents": [("trouble", {"what": "events", "about": "x"}, 1)],
    "MedsiloClock": [("trouble", {"what": "clock", "about": "x"}, 1)],
}
WELL: list[metrics.Sample] = [("up", {"party": "x"}, 1), ("studies", {"study": "x", "state": "running"}, 1)]
WELL += [("studies", {"study": "y", "state": "finished"}, 1), ("site_connected", {"site": "x"}, 1)]


@pytest.mark.parametrize("name", FIRES)
def test_each_rule_fires_where_it_is_to_and_nowhere_else(name: str, root: Path) -> None:
    (group,) = yaml.safe_load((root / "provisioning/alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert rules.keys() == FIRES.keys()
    asks = RULE.fullmatch(rules[name]["expr"])
    assert asks and asks[1] in metrics.HELP

    def fires(samples: list[metrics.Sample]) -> list[dict[str, str]]:
        own = [(labels, value) for sample, labels, value in samples if sample == asks[1]]
        return [of for of, value in own if (asks[2] is None or of[asks[2]] == asks[3]) and value == float(asks[4])]

    assert fires(WELL) == [] and len(fires([*WELL, *FIRES[name]])) == 1
    labels = re.findall(r"\$labels\.([a-z]+)", rules[name]["annotations"]["summary"])
    assert labels and set(labels) <= FIRES[name][0][1].keys()
    others = [sample for other, samples in FIRES.items() if other != name for sample in samples]
    assert fires(others) == []


@pytest.mark.long
@over_all("party", ["localhost", "st-anna"])
def test_a_scrape_a_second_takes_three_hundredths_of_a_core(kits: Path, root: Path, tmp_path: Path, party: str) -> None:
    """The server's kit has eight studies of 300 rounds, a study that grows, and a log of the largest size."""
    kit = Path(shutil.copytree(kits / party, tmp_path / party))
    if party == "localhost":
        (kit / "medsilo/study/jobs.txt").write_text(f"{uuid.uuid4()}\n")
        path = kit / "medsilo/study/rounds.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(lines[at % 2] | {"round": at + 1}) + "\n" for at in range(300)))
        for number in range(7):
            shutil.copytree(kit / "medsilo/study", kit / f"medsilo/study-{number}")
    with (kit / "events.log").open("w") as log:
        log.writelines(f"{Event('away', 'it was silent', 'north').line()}\n" for _ in range(10_000))
    command = [sys.executable, "provisioning/metrics.py", str(kit), "--port", "0"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            url = program.stdout.readline().split()[1]
            urllib.request.urlopen(url, timeout=60).read()
            before = sum(psutil.Process(program.pid).cpu_times()[:2])
            for number in range(20):
                if party == "localhost" and number % 5 == 0:
                    with path.open("a") as file:
                        file.write(json.dumps(lines[0] | {"round": 301 + number}) + "\n")
                time.sleep(1)
                assert urllib.request.urlopen(url, timeout=60).status == 200
            used = (sum(psutil.Process(program.pid).cpu_times()[:2]) - before) / 20
        finally:
            program.terminate()
    assert used < 0.03 * pace(), f"{100 * used:.1f} % of a core"
