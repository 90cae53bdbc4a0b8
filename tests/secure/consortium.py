"""Run a real federation for tests: provisioned kits, mutual TLS, one server and some hospitals, on this machine."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import yaml
from nvflare.fuel.flare_api.flare_api import Session

from medsilo import cli
from nvflare_reliability.kit_patches import connect

EXAMPLES = Path(__file__).resolve().parents[2] / "site_configs"
SERVER = "localhost"
LEAD, RIVAL, MEMBER = "lead@consortium.org", "rival@consortium.org", "member@consortium.org"
REGISTERED = "Successfully registered client"
PORTS = iter(range(12_000, 32_000))
TAKEN: list[socket.socket] = []


def free_port() -> int:
    """Return a port that no other test on this machine uses until this process ends.

    The port is below the range of ports that the system chooses freely, so that no other socket takes the port while
    the server restarts. An abstract Unix socket marks each port in use by a test.
    """
    for port in PORTS:
        taken = socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.socket() as probe:
            taken.bind(f"\0medsilo-test-{port}")
            probe.bind(("127.0.0.1", port))
            TAKEN.append(taken)
            return port
        taken.close()
    raise AssertionError("no port is free")


def write_consortium(
    path: Path, policies: Mapping[str, str], port: int, relays: Mapping[str, Sequence[str]] | None = None
) -> None:
    hospitals = [
        {
            "name": name,
            "organisation": name.replace("-", "_"),
            "contact": f"it@{name}.org",
            "policies": str(EXAMPLES / example),
        }
        for name, example in policies.items()
    ]
    server = {"host": SERVER, "port": port, "organisation": "consortium", "storage": str(path.parent / "storage")}
    people = [
        {"name": LEAD, "organisation": "consortium", "role": "lead"},
        {"name": RIVAL, "organisation": "rivals", "role": "lead"},
        {"name": MEMBER, "organisation": "consortium", "role": "member"},
    ]
    values = {"name": "consortium", "server": server, "hospitals": hospitals, "people": people}
    if relays:
        values["relays"] = [
            {"name": name, "host": SERVER, "port": free_port(), "organisation": "relays", "behind": list(behind)}
            for name, behind in relays.items()
        ]
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def provision(file: Path, kits: Path) -> None:
    assert cli.main(["kits", "make", str(file), "-o", str(kits)]) == 0


CODE = "teaching-hospital"


class Consortium:
    lead = LEAD

    def __init__(
        self,
        root: Path,
        policies: Mapping[str, str],
        make: Callable[[Path, Path], None] = provision,
        relays: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.policies = policies
        self.root, self.hospitals, self.relays = root, list(policies), list(relays or {})
        self.environment = {**os.environ, "HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, subprocess.Popen] = {}
        (root / "home").mkdir()
        self.port = free_port()
        write_consortium(root / "consortium.yaml", policies, self.port, relays)
        make(root / "consortium.yaml", root / "kits")
        for hospital in self.hospitals:
            self._settle(hospital)

    def kit(self, party: str) -> Path:
        return self.root / "kits" / party

    def _settle(self, hospital: str) -> None:
        """Change the example's settings as a hospital's administrator would: set the folders, and state that the
        machine has no GPU.
        """
        local = self.kit(hospital) / "local"
        (local / "medsilo.yaml").write_text("device: cpu\n")
        if self.policies[hospital] == CODE:
            rights = json.loads((local / "authorization.json").read_text())
            rights["permissions"]["lead"]["byoc"] = "any"
            (local / "authorization.json").write_text(json.dumps(rights))
        resources = json.loads((local / "resources.json").read_text())
        resources["components"][0]["args"]["num_of_gpus"] = 0
        (local / "resources.json").write_text(json.dumps(resources))

    def start(self, within: float = 600) -> None:
        self.start_party(SERVER)
        # The server rejects registrations before it has started, and hospitals in this test do not repeat a
        # registration.
        self.wait_for_log(SERVER, "Server started")
        for party in [*self.relays, *self.hospitals]:
            self.start_party(party)
        self.await_hospitals(within)

    def await_hospitals(self, within: float = 600) -> None:
        session = self.session()
        try:
            wait_until(lambda: len(session.get_system_info().client_info) == len(self.hospitals), within, "hospitals")
        finally:
            session.close()

    def wait_for_log(self, name: str, words: str, since: int = 0) -> str:
        wait_until(lambda: words in self.log(name)[since:], 600, f"{words!r} in the log of {name}")
        return self.log(name)[since:]

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    @contextmanager
    def changed(self, hospital: str, **environment: object) -> Iterator[None]:
        for settings in (environment, {}):
            self.end(self.processes[hospital])
            before = len(self.log(hospital))
            self.start_party(hospital, **settings)
            self.wait_for_log(hospital, REGISTERED, before)
            if settings:
                yield

    def start_party(self, party: str, kit: Path | None = None, **environment: object) -> subprocess.Popen:
        kit = kit or self.kit(party)
        is_server = party == SERVER
        kind = "server" if is_server else "relay" if party in self.relays else "client"
        role, start_file = f"{kind}.{'relay' if kind == 'relay' else f'{kind}_train'}", f"fed_{kind}.json"
        org = "consortium" if is_server else party.replace("-", "_")
        settings = ["secure_train=true", f"org={org}", "config_folder=config", *([] if is_server else [f"uid={party}"])]
        command = [sys.executable, "-m", f"nvflare.private.fed.app.{role}", "-m", str(kit), "-s", start_file, "--set"]
        more = {key: str(value) for key, value in environment.items()}
        with (self.root / f"{kit.name}.log").open("a") as log:
            self.processes[kit.name] = subprocess.Popen(
                [*command, *settings],
                cwd=kit,
                env={**self.environment, **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[kit.name]

    def family(self, party: str, word: str = "") -> list[psutil.Process]:
        parent = psutil.Process(self.processes[party].pid)
        found = []
        for member in (*parent.children(recursive=True), parent):
            with suppress(psutil.NoSuchProcess):
                if any(word in part for part in member.cmdline()):
                    found.append(member)
        return found

    def kill(self, party: str) -> None:
        """End all processes of a party at once, as a power cut does."""
        for member in (family := self.family(party)):
            member.kill()
        psutil.wait_procs(family)
        self.processes[party].wait()

    def restart(self, hospital: str, **environment: object) -> None:
        self.kill(hospital)
        before = len(self.log(hospital))
        self.start_party(hospital, **environment)
        self.wait_for_log(hospital, REGISTERED, before)

    def session(self) -> Session:
        deadline = time.monotonic() + 600
        while True:
            try:
                return connect(self.lead, self.kit(self.lead), 5.0)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)

    def run(self, job: Path, timeout: float = 600) -> str:
        return self.run_at_once([job], timeout)[0]

    def run_at_once(self, jobs: Sequence[Path], timeout: float = 600) -> list[str]:
        session = self.session()
        session.set_timeout(60.0)  # by default, a busy server's answer counts as lost after five seconds

        def states() -> list[str]:
            return [str(session.get_job_status(job_id)) for job_id in submitted]

        try:
            submitted = [session.submit_job(str(job)) for job in jobs]
            wait_until(lambda: all(state.startswith("FINISHED") for state in states()), timeout, "the jobs' end")
            return states()
        finally:
            session.close()

    def stop(self) -> None:
        self.end(*self.processes.values())

    @staticmethod
    def end(*processes: subprocess.Popen | psutil.Process) -> None:
        family = []
        for process in processes:
            try:
                family += [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            except psutil.NoSuchProcess:
                continue
        for member in family:
            if member.is_running():
                member.terminate()
        for member in psutil.wait_procs(family, timeout=8)[1]:
            member.kill()


def wait_until(true: Callable[[], bool], timeout: float, what: str, every: float = 0.2) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(every)
