"""Run four hospitals unattended for a night, over mutual TLS, on small disks: python -m tests.secure.night --seed 0.

Each party has a separate small disk for its kit and results. FedBN, AdaFed and a script with a recipe train one after
another. A seed determines all disturbances.

Machines stop, processes die, connections break, disks fill, clocks are wrong, and certificates expire or are renewed.
Unknown clients hold connections open, the webhook dies, and the server is restored from a backup in another folder.

Each study must end with the tensors of the undisturbed run. The program prints a table of each disturbance with its
party, its length and the lost answers. For each disturbance, the table has the time until the study continued, and the
messages to the webhook.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from threading import Event, Thread

import psutil
import torch
import yaml

from medsilo import cli
from medsilo.runs import paths
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import make_plan, mounted
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, provision, wait_until
from tests.secure.relay import Line, Relay
from tests.secure.test_renewing import let_end, renew
from tests.secure.test_scripts_tls import exported, models
from tests.secure.test_silent_connections import held

SITES = ["hospital-1", "hospital-2", "hospital-3", "hospital-4"]
ISOLATED = SITES[1]  # this hospital trains in a separate process
DISK = "48m"
# a study has ROUNDS rounds for each kind of disturbance; GAP has the fewest and the most rounds between two
# disturbances
ROUNDS, GAP = 56, (2, 4)
STUDIES = ("fedbn", "adafed", "script")
MOST = 300.0  # seconds within which a study must continue after a disturbance
APART = 65.0  # seconds between two disturbances, because medsilo reports disturbances within a minute as one incident
WITHIN = 30.0  # seconds within which medsilo must report each disturbance
SHIFT = "import time\n_own = time.time\ntime.time = lambda: _own() + {seconds}\n"
SLOW = Line(delay=0.15)  # with this delay, a round takes about a second on any machine
SILENT, PARTIES = 200, [SERVER, *SITES]


@dataclass(frozen=True)
class Kind:
    """A kind of disturbance: its duration in seconds, and whether the server's watch must report the disturbance."""

    away: float = 0.0
    told: bool = True
    whom: Sequence[str] = tuple(SITES)


KINDS = {
    "hospital stopped": Kind(100),
    "hospital killed": Kind(),
    "hospital rebooted": Kind(20),
    "hospital's job killed": Kind(),
    # the server notices a dead trainer only during training, but a dead script at any time
    "trainer killed": Kind(told=False, whom=(ISOLATED,)),
    "server's job killed": Kind(whom=(SERVER,)),
    "server killed": Kind(whom=(SERVER,)),
    "server stopped": Kind(30, whom=(SERVER,)),
    "line cut": Kind(20),
    "line silent": Kind(60),
    "clock ahead": Kind(whom=SITES),
    "clock behind": Kind(whom=SITES),
    "disk full": Kind(25),
    "server's disk full": Kind(30, whom=(SERVER,)),
    "run folder removed": Kind(told=False),
    "silent guests": Kind(20, told=False, whom=(SERVER,)),
    "half a ClientHello": Kind(20, told=False, whom=(SERVER,)),
    "power lost in a handshake": Kind(20),
    "renewed": Kind(whom=(*SITES, LEAD)),
    "server renewed": Kind(whom=(SERVER,)),
    "certificate ended": Kind(20),
    "webhook dead": Kind(20),
    "restored elsewhere": Kind(whom=(SERVER,)),
    "all lines cut": Kind(20, whom=("all",)),
}


PROCESSES = {
    "hospital killed": "client_train",
    "hospital's job killed": "client.worker_process",
    "trainer killed": "federation.process.worker",
    "server killed": "server_train",
    "server's job killed": "runner_process",
}


class Webhook:
    """A web server that records each message with its time and sender; a stopped web server answers 503."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str, str]] = []
        self.dead = Event()
        own = self

        class Listener(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
                if not own.dead.is_set():
                    own.told.append((time.monotonic(), self.path.strip("/"), text))
                self.send_response(503 if own.dead.is_set() else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        Thread(target=self.server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            self.server.shutdown()

    def of(self, party: str, since: float, until: float) -> list[tuple[float, str]]:
        return [(at, text) for at, whose, text in self.told if whose == party and since <= at < until]


@dataclass
class Row:
    study: str
    at: float
    kind: str
    whom: str
    seconds: float
    over: float
    lost: int = 0
    recovery: float = 0.0
    told: list[tuple[float, str]] = field(default_factory=list)
    # messages from hospitals' watch programs about facts that the server cannot know
    at_home: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_told(self) -> bool:
        return KINDS[self.kind].told and self.whom != LEAD

    @property
    def late(self) -> float:
        begins = self.over if self.kind == "webhook dead" else self.at
        return self.told[0][0] - begins if self.told else 0.0

    def line(self, began: float) -> str:
        told = _short(self.told)
        return (
            f"| {self.at - began:5.0f} | {self.study} | {self.kind} | {self.whom} | {self.seconds:.0f} | {self.lost} "
            f"| {self.recovery:.0f} | {len(self.told)} | {self.late:.0f} | {told} | {_short(self.at_home)} |"
        )


def _short(told: Sequence[tuple[float, str]]) -> str:
    return " || ".join(text.removeprefix("medsilo: ").replace("\n", " / ") for _, text in told) or "-"


HEAD = (
    "| s | study | disturbance | whom | seconds | answers lost | on after | messages | first after | told | at home |\n"
    "|--:|---|---|---|--:|--:|--:|--:|--:|---|---|"
)


class Machines(Consortium):
    """Keep each party running, as a service manager would; the party's kit and results are on one small disk."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.stack = stack
        super().__init__(root, dict.fromkeys(SITES, "teaching-hospital"), self._make)
        for party in PARTIES:
            kit = root / "kits" / party
            self.onto_a_disk(party)
            if party in SITES:
                (kit / "local/medsilo.yaml").write_text(
                    "device: cpu\n" + ("" if party == ISOLATED else "memory_limit: 0\n")
                )
        self.relays_of = {site: stack.enter_context(Relay(self.port, SLOW)) for site in SITES}
        self.through_relays()

    def onto_a_disk(self, party: str) -> None:
        kit = self.root / "kits" / party
        kit.rename(aside := kit.with_name(f".{party}-aside"))
        self.stack.enter_context(mounted(kit, DISK))
        shutil.copytree(aside, kit, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(aside)

    @staticmethod
    def _make(file: Path, kits: Path) -> None:
        values = yaml.safe_load(file.read_text())
        # the server stores jobs on its small disk, so that two nights share no jobs
        values["server"]["storage"] = str(kits / SERVER / "storage")
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        provision(file, kits)

    def through_relays(self) -> None:
        for site, relay in self.relays_of.items():
            relay.take_in(self.kit(site) / "startup")

    def start_party(self, party: str, kit: Path | None = None, **environment: object) -> subprocess.Popen:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {key: str(value) for key, value in environment.items()}
        with (self.root / f"{party}.log").open("a") as log:
            self.processes[party] = subprocess.Popen(
                ["bash", str(self.kit(party) / "keep-running.sh")],
                env={**self.environment, "PATH": path, "MEDSILO_LONGEST_WAIT": "5", **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[party]


class Night:
    def __init__(self, folder: Path, stack: ExitStack, root: Path) -> None:
        self.root, self.stack, self.hook = root, stack, Webhook()
        self.machines = Machines(folder, stack)
        stack.callback(self.machines.stop)
        stack.enter_context(self.hook.listening())
        self.watches: dict[str, subprocess.Popen] = {}
        stack.callback(lambda: Consortium.end(*self.watches.values()))
        for party in PARTIES:
            self.watch(party)
        self.machines.start()

    def watch(self, party: str) -> None:
        if party in self.watches:
            Consortium.end(self.watches[party])
        kit = self.machines.kit(party)
        command = [
            sys.executable,
            str(self.root / "provisioning/metrics.py"),
            str(kit),
            "--port",
            "0",
            "--disk",
            "0.001",
            *(["--beside-server"] if party in SITES else []),
        ]
        own = {**os.environ, "MEDSILO_WEBHOOK": f"{self.hook.url}/{party}"}
        self.watches[party] = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=own)

    def save_words(self, folder: Path) -> None:
        """Save the status, the events and the webhook's messages, from which a lead can see what happened."""
        folder.mkdir(parents=True)
        status = ["status", "--kit", str(self.machines.kit(LEAD))]
        with (folder / "status.txt").open("w") as file:
            subprocess.run([sys.executable, "-m", "medsilo", *status], stdout=file, stderr=file)
        shutil.copy(self.machines.kit(SERVER) / "events.log", folder)
        zero = time.time() - time.monotonic()
        told = [
            f"{datetime.fromtimestamp(zero + at, UTC):%H:%M:%S} {text}" for at, text in self.hook.of(SERVER, 0, inf)
        ]
        (folder / "webhook.txt").write_text("\n".join(told))

    def job_of(self, study: str) -> str:
        return (self.machines.kit(SERVER) / "medsilo" / study / "jobs.txt").read_text().split()[-1]

    def disturb(self, kind: str, whom: str, study: str) -> None:
        if kind in PROCESSES:
            own = study not in STUDIES and kind == "trainer killed"
            return self._kill(whom, "custom/client.py" if own else PROCESSES[kind])
        away = KINDS[kind].away
        doing: dict[str, Callable[[str, float], None]] = {
            "hospital stopped": self._stop,
            "server stopped": self._stop,
            "hospital rebooted": self._reboot,
            "line cut": self._cut,
            "all lines cut": self._cut,
            "line silent": self._hush,
            "clock ahead": lambda whom, _: self._shift(whom, 600),
            "clock behind": lambda whom, _: self._shift(whom, -600),
            "disk full": self._fill,
            "server's disk full": self._fill,
            "run folder removed": lambda whom, _: shutil.rmtree(self.machines.kit(whom) / self.job_of(study)),
            "silent guests": self._guests,
            "half a ClientHello": self._half_a_hello,
            "power lost in a handshake": self._lose_power,
            "renewed": self._renew,
            "server renewed": self._renew,
            "certificate ended": self._let_end,
            "webhook dead": self._deafen,
            "restored elsewhere": self._restore,
        }
        doing[kind](whom, away)

    def _again(self, party: str, **environment: object) -> None:
        self.machines.kill(party)
        self.machines.start_party(party, **environment)

    def _stop(self, whom: str, away: float) -> None:
        family = self.machines.family(whom)
        self._signal(family, signal.SIGSTOP)
        time.sleep(away)
        self._signal(family, signal.SIGCONT)

    def _reboot(self, whom: str, away: float) -> None:
        self.machines.kill(whom)
        time.sleep(away)
        self.machines.start_party(whom)

    def _cut(self, whom: str, away: float) -> None:
        lines = [one for site, one in self.machines.relays_of.items() if whom in (site, "all")]
        for line in lines:
            line.cut()
        time.sleep(away)
        for line in lines:
            line.mend()

    def _hush(self, whom: str, away: float) -> None:
        self.machines.relays_of[whom].hush()
        time.sleep(away)
        self.machines.relays_of[whom].speak()

    def _shift(self, whom: str, seconds: int) -> None:
        shifted = self.machines.root / f"clock-{whom}-{seconds}"
        shifted.mkdir(exist_ok=True)
        (shifted / "sitecustomize.py").write_text(SHIFT.format(seconds=seconds))
        self._again(whom, PYTHONPATH=shifted)

    def _fill(self, whom: str, away: float) -> None:
        with (self.machines.kit(whom) / "filler").open("wb", buffering=0) as filler:
            until = time.monotonic() + away
            while time.monotonic() < until:
                with suppress(OSError):
                    while filler.write(b"x" * 4096):
                        pass
                time.sleep(0.05)
        Path(filler.name).unlink()

    def _guests(self, _: str, away: float) -> None:
        with held(self.machines.port, SILENT):
            time.sleep(away)

    def _half_a_hello(self, _: str, away: float) -> None:
        with self._hello(half=True):
            time.sleep(away)

    def _lose_power(self, whom: str, away: float) -> None:
        self.machines.kill(whom)
        with self._hello():
            self.machines.start_party(whom)
            time.sleep(away)

    def _renew(self, whom: str, _: float = 0.0) -> None:
        renew(self.machines, whom)
        self.machines.through_relays()
        if whom == SERVER:
            self._again(SERVER)

    def _let_end(self, whom: str, away: float) -> None:
        let_end(self.machines.kit(whom), self.machines.root / "kits/private-root/consortium/state/cert.json", 5)
        self.machines.through_relays()
        time.sleep(6)
        self._again(whom)
        time.sleep(away)
        self._renew(whom)
        self._again(whom)

    def _deafen(self, whom: str, away: float) -> None:
        self.hook.dead.set()
        self._kill(whom, PROCESSES["hospital killed"])
        time.sleep(away)
        self.hook.dead.clear()

    def _restore(self, whom: str, _: float) -> None:
        """Restore the server on another disk; the backup is current, because the server is suspended during the
        backup.
        """
        kit, file = self.machines.kit(whom), self.machines.root / f"backup-{time.monotonic():.0f}.zip"
        self._signal(self.machines.family(whom), signal.SIGSTOP)
        assert cli.main(["kits", "backup", str(kit), "-o", str(file)]) == 0
        self.machines.kill(whom)
        subprocess.run(["umount", "-l", str(kit)], check=True)
        kit.rmdir()
        assert cli.main(["kits", "restore", str(file), "--kit", str(kit)]) == 0
        self.machines.onto_a_disk(whom)
        self.machines.start_party(whom)
        self.watch(whom)

    def _kill(self, party: str, word: str) -> None:
        wait_until(lambda: bool(self.machines.family(party, word)), MOST, word)
        self._signal(self.machines.family(party, word), signal.SIGKILL)

    @staticmethod
    def _signal(family: Sequence[psutil.Process], sign: signal.Signals) -> None:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(sign)

    @contextmanager
    def _hello(self, half: bool = False) -> Iterator[None]:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=SERVER).do_handshake()
        words = outgoing.read()
        with socket.create_connection(("127.0.0.1", self.machines.port)) as line:
            line.sendall(words[: len(words) // 2] if half else words)
            yield

    def third(
        self,
        study: str,
        record: Callable[[], Record],
        kinds: Sequence[tuple[str, str]],
        dice: random.Random,
        began: float,
    ) -> Iterator[Row]:
        def goes_on(rounds: int, what: str) -> None:
            wanted = len(record().rounds()) + rounds
            wait_until(lambda: len(record().rounds()) >= wanted, MOST, f"round {wanted}, {what}")

        for kind, whom in kinds:
            goes_on(dice.randint(*GAP), f"before {kind!r}")
            at, before = time.monotonic(), len(record().rounds())
            self.disturb(kind, whom, study)
            row = Row(study, at, kind, whom, time.monotonic() - at, time.monotonic())
            goes_on(2, f"after {kind!r} of {whom}")
            row.recovery = time.monotonic() - row.over
            row.lost = sum(len(line.lost | line.refused) for line in record().rounds()[before:])
            time.sleep(max(APART - (time.monotonic() - at), 45.0) if row.is_told else 15.0)
            row.told = self.hook.of(SERVER, at, time.monotonic())
            row.at_home = [one for site in SITES for one in self.hook.of(site, at, time.monotonic())]
            print(row.line(began), flush=True)
            yield row


def until_the_end(record: Callable[[], Record], study: str) -> None:
    """Wait for the last round of a study, as long as the study makes progress."""
    while not record().finished():
        done = len(record().rounds())
        wait_until(
            lambda done=done: bool(record().finished()) or len(record().rounds()) > done, MOST, f"{study} goes on"
        )


def drawn(dice: random.Random) -> list[tuple[str, str]]:
    return [(kind, dice.choice(KINDS[kind].whom)) for kind in dice.sample(sorted(KINDS), len(KINDS))]


def run(folder: Path, seed: int, root: Path, only: Sequence[str] = (), studies: Sequence[str] = STUDIES) -> list[Row]:
    dice = random.Random(seed)
    all_kinds = [one for one in drawn(dice) if not only or one[0] in only]
    rows = list[Row]()
    parts = [own for own in STUDIES if own in studies] if only else STUDIES
    share = -(-len(all_kinds) // len(parts))
    with ExitStack() as stack:
        night = Night(folder, stack, root)
        kit, began = night.machines.kit, time.monotonic()
        print(HEAD, flush=True)
        for number, method in enumerate(parts):
            kinds = all_kinds[number * share : (number + 1) * share]
            if not kinds or method not in studies:
                continue
            if method == "script":
                _script(night, kinds, dice, began, folder, root, rows)
                continue
            changes = [f"training.rounds={ROUNDS * len(kinds)}", "participation.when_missing=wait"]
            plan = make_plan(method, *changes, "participation.resume=30", sites=SITES)
            inprocess.run(plan, folder=folder / "undisturbed" / method)
            write_job(folder / "jobs" / method, plan, study=method)
            lead.submit(folder / "jobs" / method, kit(LEAD), lambda line: None)

            def record(method: str = method) -> Record:
                return Record(kit(SERVER) / "medsilo" / method)

            rows += night.third(method, record, kinds, dice, began)
            until_the_end(record, method)
            night.save_words(folder / "words" / method)
            outcome = folder / "outcome" / method
            shutil.copytree(record().folder, outcome)
            for site in SITES:
                shutil.copytree(kit(site) / "medsilo" / method / "sites" / site, outcome / "sites" / site)
            assert [line.round for line in record().rounds()] == list(range(1, plan.rounds + 1))
            assert_same_outcome(folder / "undisturbed" / method, outcome)
            for party in PARTIES:
                shutil.rmtree(kit(party) / "medsilo" / method)
        print(f"\n{time.monotonic() - began:.0f} s; tensors as undisturbed; seed {seed}", flush=True)
    return rows


def _script(
    night: Night,
    kinds: Sequence[tuple[str, str]],
    dice: random.Random,
    began: float,
    folder: Path,
    root: Path,
    rows: list[Row],
) -> None:
    ends = []
    for disturbed in (False, True):
        rounds = ROUNDS * len(kinds) // 2
        job = exported(root, folder / f"script-{disturbed}", "FedBN", rounds, SITES, [ISOLATED])
        server = night.machines.kit(SERVER) / "medsilo"
        before = {path.name for path in server.iterdir()} if server.exists() else set()
        session = night.machines.session()
        session.submit_job(str(job))
        session.close()

        def new(before: set[str] = before) -> list[Path]:
            there = night.machines.kit(SERVER) / "medsilo"
            return [path.parent for path in there.glob(f"*/{paths.PLAN}") if path.parent.name not in before]

        wait_until(lambda new=new: bool(new()), MOST, "the script's study")
        study = new()[0].name

        def record(study: str = study) -> Record:
            return Record(night.machines.kit(SERVER) / "medsilo" / study)

        if disturbed:
            rows += night.third(study, record, kinds, dice, began)
        until_the_end(record, "the script")
        night.save_words(folder / "words" / study)
        assert [line.round for line in record().rounds()] == list(range(1, rounds + 1))
        ends.append(models(night.machines, study, SITES))
    for one, other in zip(*ends, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/night"))
    parser.add_argument("--only", nargs="*", choices=sorted(KINDS), default=(), help="nothing else happens")
    parser.add_argument("--studies", nargs="*", choices=STUDIES, default=STUDIES, help="no others")
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(asked.folder.resolve(), asked.seed, Path(__file__).parents[2], asked.only, asked.studies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
