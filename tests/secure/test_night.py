"""A night: six hospitals over mutual TLS, a canary, ten disturbances of ten kinds in random order, and nobody types.

keep-running.sh stands for systemd. Every line that needs somebody, or says that something is over, is told once.
SEED=7 draws another night.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from medsilo import cli
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs import event_reading
from medsilo.runs.event_reading import LAST, columns_of
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.conftest import SITES, make_plan, mounted
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.relay import Line, Relay

SIX = [*SITES, "hospital-d", "hospital-e", "hospital-f"]
ISOLATED, SMALL, FAR = SIX[0], SIX[1], SIX[2]  # trains in a process of its own; has a small disk; has a slow line
STUDY, ROUNDS, GAP = "night", 70, (2, 4)  # rounds from one disturbance to the next
MOST = 400.0  # seconds until the study goes on after a disturbance
AWAY = {"line cut": 20, "hospital rebooted": 20, "hospital stopped": 110, "disk full": 25, "server's disk full": 40}
SAYS = {  # the line in events.log of each kind: what, and words of its text
    "server's job killed": ("failed", "goes on by itself"),
    "server killed": ("failed", "goes on by itself"),
    "server's disk full": ("failed", "the disk is full"),
    "disk full": ("refused", "the disk is full"),
    "trainer killed": ("failed", "SIGKILL"),
    "hospital's job killed": ("failed", "another goes on"),
    "hospital killed": ("back", ""),
    "hospital rebooted": ("back", ""),
    "hospital stopped": ("back", ""),
    "line cut": ("back", ""),
}
AT_HOME = ("disk full", "trainer killed", "hospital's job killed")  # the hospital's own log has them


class Machines(Consortium):
    """Each party is kept running as at a hospital."""

    def start_party(self, party: str, kit: Path | None = None, **environment: object) -> subprocess.Popen:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with (self.root / f"{party}.log").open("a") as log:
            self.processes[party] = subprocess.Popen(
                ["bash", str(self.kit(party) / "keep-running.sh")],
                env={**self.environment, "PATH": path},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[party]


@contextmanager
def webhook() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Listen on this machine; the path names the party; returns its address, and the party and text of all it got."""
    told = list[tuple[str, str]]()

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            told.append((self.path.strip("/"), text))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", told
        server.shutdown()


@contextmanager
def alerts(kits: Sequence[Path], url: str, root: Path) -> Iterator[None]:
    """The process of each party that tells."""
    program, running = root / "provisioning/metrics.py", []
    for kit in kits:
        more = ["--port", "0", "--disk", "0.001", "--webhook", f"{url}/{kit.name}"]
        running.append(subprocess.Popen([sys.executable, str(program), str(kit), *more], stdout=subprocess.DEVNULL))
    try:
        yield
    finally:
        for process in running:
            process.terminate()
            process.wait()


class Night:
    """The federation, its lines and disks, and what happens to them."""

    def __init__(self, folder: Path, lines: ExitStack) -> None:
        self.consortium = consortium = Machines(folder, dict.fromkeys(SIX, "teaching-hospital"))
        self.disks = {party: lines.enter_context(mounted(folder / f"disk-{party}", "8m")) for party in (SERVER, SMALL)}
        for party in (SERVER, *SIX):
            own = ["device: cpu"] if party in SIX else []
            own += ["memory_limit: 0"] if party in SIX and party != ISOLATED else []
            own += [f"output: {self.disks[party]}"] if party in self.disks else []
            (consortium.kit(party) / "local/medsilo.yaml").write_text("".join(f"{line}\n" for line in own))
        slow = Line(rate=200_000, delay=0.05, loss=0.005)
        self.relays = {site: lines.enter_context(Relay(consortium.port, slow if site == FAR else None)) for site in SIX}
        for site, relay in self.relays.items():
            relay.take_in(consortium.kit(site) / "startup")
        lines.callback(consortium.stop)

    def runs(self, party: str) -> Path:
        """Return the folder of a party's studies."""
        return self.disks.get(party, self.consortium.kit(party) / "medsilo")

    def disturb(self, kind: str, site: str) -> None:
        """Let one thing happen, and end."""
        away = AWAY.get(kind, 0)
        if kind.endswith("disk full"):
            with (self.disks[SERVER if "server" in kind else SMALL] / "filler").open("wb", buffering=0) as filler:
                until = time.monotonic() + away
                while time.monotonic() < until:
                    with suppress(OSError):
                        while filler.write(b"x" * 4096):
                            pass
                    time.sleep(0.05)
            Path(filler.name).unlink()
        elif kind == "line cut":
            self.relays[site].cut()
            time.sleep(away)
            self.relays[site].mend()
        elif kind == "hospital rebooted":
            self.consortium.kill(site)
            time.sleep(away)
            self.consortium.start_party(site)
        elif kind == "hospital stopped":
            family = self.consortium.family(site)
            for sign in (signal.SIGSTOP, signal.SIGCONT):
                for process in family:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(sign)
                time.sleep(away if sign == signal.SIGSTOP else 0)
        else:
            of = {
                "server's job killed": (SERVER, "runner_process"),
                "server killed": (SERVER, "server_train"),
                "trainer killed": (site, "federation.process.worker"),
                "hospital's job killed": (site, "client.worker_process"),
                "hospital killed": (site, "client_train"),
            }
            party, word = of[kind]
            wait_until(lambda: bool(self.consortium.family(party, word)), MOST, word)
            for process in self.consortium.family(party, word):
                process.kill()


@dataclass(frozen=True)
class Happened:
    """A disturbance, and how many lines each party's events.log had before it."""

    kind: str
    site: str
    before: dict[str, int]

    @property
    def party(self) -> str:
        """Return whose log has it."""
        return self.site if self.kind in AT_HOME else SERVER

    def lines(self, kit: Path, after: "Happened | None" = None) -> list[str]:
        """Return the lines that say it, until the next one."""
        what, word = SAYS[self.kind]
        whose = [self.site, "-"] if what == "back" else ["-", STUDY]
        of = list(event_reading.read(kit))[self.before[self.party] : after and after.before[self.party]]
        return [line for line in of if line.split("\t")[2:5] == [what, *whose] and word in line]


def is_news(line: str) -> bool:
    """Whether somebody is to be told of a line at once."""
    columns = columns_of(line)
    return columns is not None and (columns[1] == "WARNING" or columns[2] in ("back", *LAST))


@pytest.mark.long
def test_a_night(tmp_path: Path, root: Path) -> None:
    dice = random.Random(seed := int(os.environ.get("SEED", "0")))
    changes = [f"training.rounds={ROUNDS}", "participation.when_missing=wait", "participation.resume=10"]
    plan = make_plan("fedbn", *changes, sites=SIX)
    inprocess.run(plan, folder=tmp_path / "undisturbed")
    with ExitStack() as stack:
        night = Night(tmp_path, stack)
        kit = night.consortium.kit
        url, told = stack.enter_context(webhook())
        stack.enter_context(alerts([kit(party) for party in (SERVER, *SIX)], url, root))
        night.consortium.start()
        at = time.monotonic()
        assert cli.main(["submit", "--canary", "--kit", str(kit(LEAD))]) == 0
        print(f"canary: {(took := time.monotonic() - at):.0f} s", flush=True)
        assert took < 120
        write_job(tmp_path / "job", plan, study=STUDY)
        lead.submit(tmp_path / "job", kit(LEAD), print)
        record, began, happened = Record(night.runs(SERVER) / STUDY), time.monotonic(), list[Happened]()

        def goes_on(rounds: int, what: str) -> None:
            wanted = len(record.rounds()) + rounds
            wait_until(lambda: len(record.rounds()) >= wanted, MOST, f"round {wanted}, {what}; seed {seed}")

        for kind in dice.sample(sorted(SAYS), len(SAYS)):
            goes_on(dice.randint(*GAP), f"before {kind!r}")
            site = ISOLATED if kind == "trainer killed" else SMALL if kind == "disk full" else dice.choice(SIX)
            one = Happened(kind, site, {party: len(list(event_reading.read(kit(party)))) for party in (SERVER, *SIX)})
            happened.append(one)
            at = time.monotonic()
            night.disturb(kind, site)
            over = time.monotonic()
            goes_on(2, f"after {kind!r}")
            took, since = time.monotonic() - over, at - began
            print(f"{since:4.0f} s: {kind} ({site}) for {over - at:.0f} s, on after {took:.0f} s", flush=True)
            wait_until(partial(one.lines, kit(one.party)), MOST, f"{kind!r} in events.log of {one.party}")
        wait_until(lambda: bool(record.finished()), MOST, "the study's end")
        print(f"{time.monotonic() - began:4.0f} s: the end", flush=True)
        time.sleep(15)  # until all is told
        assert [line.round for line in record.rounds()] == list(range(1, ROUNDS + 1))
        shutil.copytree(record.folder, tmp_path / "outcome")
        for site in SIX:
            shutil.copytree(night.runs(site) / STUDY / "sites" / site, tmp_path / "outcome/sites" / site)
        assert_same_outcome(tmp_path / "undisturbed", tmp_path / "outcome")
        for one, after in zip(happened, [*happened[1:], None], strict=True):
            (line,) = one.lines(kit(one.party), after)
            assert is_news(line)
        for party in (SERVER, *SIX):  # the disk has its line in no log
            news = Counter(
                f"medsilo: {event_reading.shown(line)}" for line in event_reading.read(kit(party)) if is_news(line)
            )
            got = Counter(text for whose, text in told if whose == party)
            assert news <= got and all(got[text] == news[text] for text in news), (party, news, got)
            assert sum("GB are free" in text for text in got) == 2 * (party in night.disks)
