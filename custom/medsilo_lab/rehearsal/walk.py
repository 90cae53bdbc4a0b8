"""The walk through a consortium: its parts, each a command in a process of its own."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any, Self

import psutil

from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_bytes, write_json
from medsilo.site.settings import SiteSettings
from medsilo_lab.consortium.description import read_consortium

HERE = "localhost"  # so that the server listens on the loopback address only
STARTS = 120  # seconds until all are connected


class Walk:
    """Everybody's processes on this machine; leaving it ends those that it started, and no others."""

    def __init__(self, screen: Console, consortium: Path, folder: Path) -> None:
        self.screen, self.folder, self.kits = screen, folder, folder / "kits"
        self.file = folder / "consortium.yaml"
        self.typed: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.step = 0
        self.described = _at_home(consortium, folder)
        self.hospitals = [hospital["name"] for hospital in self.described["hospitals"]]
        self.parties = [HERE, *(relay["name"] for relay in self.described["relays"]), *self.hospitals]
        leads = [person["name"] for person in self.described["people"] if person["role"] == "lead"]
        if not leads:
            raise MedsiloError(f"{consortium}: people: nobody has the role 'lead', who submits jobs; name one")
        self.lead = self.kits / leads[0]
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        self.environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PATH": programs}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what was started here."""
        parents = [psutil.Process(process.pid) for process in self.processes if process.poll() is None]
        family = [member for parent in parents for member in (*parent.children(recursive=True), parent)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        for member in psutil.wait_procs(family, timeout=8)[1]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self.processes:
            process.wait()

    def wait(self) -> None:
        """Let all go on until Ctrl-C."""
        self.screen.end()
        with suppress(KeyboardInterrupt):
            Event().wait()

    # ---------------------------------------------------------------------------------------------- the study
    def study(self, job: Path, changes: Sequence[str]) -> Path:
        """Walk from the consortium's file to a fetched run; returns the run's folder."""
        self.folder.mkdir(parents=True)
        write_json(self.file, self.described)  # JSON is YAML
        self._next("The lead makes a signed kit for everybody.")
        self._medsilo("kits", "make", self.file, "-o", self.kits)
        for hospital in self.hospitals:
            self._settle(hospital)
        self._next("The lead writes the study, and sends it to the hospitals to read.")
        sites = f"participation.sites=[{','.join(self.hospitals)}]"
        plan = [part for change in (sites, *changes) for part in ("--set", change)]
        packed = self.folder / "job"
        self._medsilo("submit", job, *plan, "-o", packed)
        self._next("The server's and each hospital's engineer start theirs.")
        for party in self.parties:
            self._start(party)
        self._await_hospitals()
        self._next("Each hospital checks its machine and data against the study.")
        for hospital in self.hospitals:
            private = self.folder / f"{hospital}-private.txt"
            self._medsilo("check", packed, "--kit", self.kits / hospital, "--private", private, last=1)
        self._next(f"{self.hospitals[0]} runs nothing that it has not approved (approval: required).")
        self._medsilo("approve", packed, "--kit", self.kits / self.hospitals[0], "--expires", "30d")
        self._next("The lead submits the study, watches it, and fetches its result.")
        said = self._medsilo("submit", packed, "--kit", self.lead)
        study = next((line for line in reversed(said) if re.fullmatch(r"[0-9a-f-]{36}", line)), None)
        if study is None:
            raise MedsiloError(f"submit printed no job's id; {self._logs}")
        self._medsilo("status", study, "--watch", "--kit", self.lead)
        self._medsilo("download", study, "--kit", self.lead, "-o", self.folder / "run")
        return next((self.folder / "run").iterdir())

    def stop(self) -> None:
        """Show how everybody stops; what was started here ends with the walk."""
        self._next("Everybody stops theirs.")
        for party in self.parties:
            self._shown(self.kits / party / "startup" / "stop_fl.sh")

    def _settle(self, hospital: str) -> None:
        """Change a kit's local/ as its engineer would: own folders, and what this machine has."""
        local = self.kits / hospital / "local"
        own = SiteSettings.read(local).model_dump(mode="json", exclude_unset=True)
        folders = {"data": self.folder / "data" / hospital, "output": self.folder / "results" / hospital}
        for place in folders.values():
            place.mkdir(parents=True)
        own |= {key: str(place.resolve()) for key, place in folders.items()}
        own |= {"approval": "required"} if hospital == self.hospitals[0] else {}
        write_json(local / SiteSettings.FILE, own)
        resources = local / "resources.json"
        write_bytes(resources, re.sub(rb'("num_of_gpus":\s*)\d+', rb"\g<1>0", resources.read_bytes()))

    def _await_hospitals(self) -> None:
        deadline = time.monotonic() + STARTS
        line = _line(["status", "--kit", self.lead, "--require", ",".join(self.hospitals)])
        with self.screen.busy("waiting until all are connected"):
            while subprocess.run(line, check=False, **self._piped).returncode:
                if time.monotonic() > deadline:
                    raise MedsiloError(f"not all are connected after {STARTS} s; {self._logs}")
                time.sleep(1)

    # ---------------------------------------------------------------------------------------------- its parts
    @property
    def _logs(self) -> str:
        return f"everybody's log lies in {self.folder / 'logs'}"

    def _next(self, what: str) -> None:
        self.step += 1
        self.screen.say(f"\n{self.step}. {what}")

    def _shown(self, *command: object) -> None:
        self.typed.append(" ".join(map(str, command)))
        self.screen.say(f"   $ {self.typed[-1]}")

    def _start(self, party: str) -> None:
        """Start a party as startup/start.sh does, but for the loop that starts it again."""
        startup = self.kits / party / "startup"
        self._shown(startup / "start.sh")
        log = self.folder / "logs" / f"{party}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as to:
            once = ["bash", str((startup / "sub_start.sh").resolve()), "--once"]
            self.processes.append(
                subprocess.Popen(once, env=self.environment, stdout=to, stderr=to, start_new_session=True)
            )

    def _medsilo(self, *command: object, last: int = 0) -> list[str]:
        """Run a command of medsilo's and show it with what it says, as it comes; returns its lines.

        last: show so many at the end only.
        """
        self._shown("medsilo", *command)
        lines = list[str]()
        with self.screen.busy(str(command[0])), subprocess.Popen(_line(command), **self._piped) as doing:
            for line in doing.stdout or ():
                lines.append(line.rstrip())
                if not last:
                    self.screen.say(f"   {lines[-1]}")
        for line in lines[-last:] if last else ():
            self.screen.say(f"   {line}")
        if doing.returncode:
            raise MedsiloError(f"medsilo {command[0]} ended with {doing.returncode}; {self._logs}")
        return lines

    @property
    def _piped(self) -> dict[str, Any]:
        return {"env": self.environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _line(command: Sequence[object]) -> list[str]:
    return ["medsilo", *map(str, command)]


def _at_home(consortium: Path, folder: Path) -> dict[str, Any]:
    """Return a consortium whose server and relays are this machine, at ports that are free."""
    described = read_consortium(consortium).model_dump(mode="json")
    port, *ports = _free_ports(1 + len(described["relays"]))
    own = {"host": HERE, "port": port, "storage": str((folder / "storage").resolve())}
    described["server"] |= own
    for relay, free in zip(described["relays"], ports, strict=True):
        relay |= {"host": HERE, "port": free}
    return described


def _free_ports(number: int) -> list[int]:
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]
