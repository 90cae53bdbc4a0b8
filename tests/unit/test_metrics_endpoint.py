"""Metrics: operators see of a server and of a hospital: numbers, a probe, and word of who falls out."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from medsilo.federation import inprocess
from medsilo.site.settings import SiteSettings
from provisioning import metrics
from tests.conftest import SITES, make_plan
from tests.unit.test_provision import kits_of

CPU = SiteSettings(device="cpu")
LINE = re.compile(r'medsilo_([a-z_]+)\{(?:[a-z]+="[^"]*",?)*\} -?[0-9.e+-]+')


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server and a hospital after a study that one site was not part of in round 2."""
    folder = tmp_path_factory.mktemp("metrics")
    kits_of(folder)
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
    own, site = 'study="study"', f'study="study",site="{SITES[1]}"'
    assert numbers['medsilo_up{party="localhost"}'] == 0 and numbers[f"medsilo_rounds{{{own}}}"] == 2
    assert numbers[f'medsilo_studies{{{own},state="finished"}}'] == 1 and numbers["medsilo_disk_free_bytes{}"] > 0
    assert numbers[f"medsilo_site_answered_rounds{{{site}}}"] == 2 == numbers[f"medsilo_site_round{{{site}}}"]
    sent = sum(line["sites"][SITES[1]]["bytes_up"] for line in rounds)
    assert numbers[f'medsilo_site_bytes{{{site},direction="up"}}'] == sent > 0
    absences, before = metrics.Absences(kit / "medsilo"), path.read_text()
    assert absences.news() == []
    lost = rounds[1] | {"round": 3, "answered": [], "lost": {SITES[1]: "no answer"}}
    lost["sites"].pop(SITES[1])
    try:
        path.write_text(before + json.dumps(lost) + "\n")
        (line,) = absences.news()
        assert f"{SITES[1]} fell out of study in round 3: lost: no answer" in line and absences.news() == []
        assert told(kit)[f"medsilo_site_missed_rounds{{{site}}}"] == 1
        path.write_text(before + json.dumps(lost) + "\n" + json.dumps(rounds[1] | {"round": 4}) + "\n")
        assert [line.rpartition(" in ")[0] for line in absences.news()] == [f"medsilo: {SITES[1]} is back in study"]
        path.write_text("damaged\n")
        assert told(kit)["medsilo_unreadable{}"] == 1
    finally:
        path.write_text(before)


def test_a_hospital_tells_what_waits(kits: Path) -> None:
    numbers = told(kits / "st-anna")
    assert numbers["medsilo_approvals_waiting{}"] == 0 == numbers["medsilo_unreadable{}"]


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    got: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got
    server.shutdown()


def test_a_webhook_gets_a_line_and_its_failure_stops_nothing(
    hook: tuple[str, list[dict[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, got = hook
    metrics.post(url, "north fell out")
    assert got == [{"text": "north fell out"}]
    metrics.post("http://127.0.0.1:1/", "lost")
    assert "the webhook did not take 'lost'" in capsys.readouterr().err


def test_the_program_serves_this_machine_alone(kits: Path, root: Path) -> None:
    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "provisioning/metrics.py", *arguments]
        return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    wrong = start(str(kits / "localhost"), "--webhook", "http://elsewhere.org/hook")
    assert "https://" in wrong.communicate(timeout=60)[1] and wrong.returncode == 1
    running = start(str(kits / "localhost"), "--port", "0")
    try:
        assert running.stdout
        url = running.stdout.readline().split()[1].removesuffix("/metrics")
        assert url.startswith("http://127.0.0.1:")
        assert b'medsilo_rounds{study="study"} 2.0' in urllib.request.urlopen(f"{url}/metrics", timeout=30).read()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/healthz", timeout=30)
    finally:
        running.terminate()
        running.communicate()


def test_the_dashboard_asks_for_what_is_told(root: Path) -> None:
    board = json.loads((root / "provisioning/grafana.json").read_text())
    asked = {name for one in board["panels"] for name in re.findall(r"medsilo_([a-z_]+)", one["targets"][0]["expr"])}
    assert asked and asked <= metrics.HELP.keys()
