"""A real federation for tests: provisioned kits, mutual TLS, one server and some hospitals, all on this machine."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

NAME = "consortium"
SERVER = "server"
LEAD = "lead@consortium.org"


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def project(hospitals: Sequence[str], port: int) -> dict[str, Any]:
    """NVFlare's project file for one server, these hospitals and a lead."""
    server = {
        "name": SERVER,
        "type": "server",
        "org": "consortium",
        "fed_learn_port": port,
        "admin_port": port,
        "default_host": "localhost",
        "host_names": ["127.0.0.1"],
    }
    clients = [{"name": name, "type": "client", "org": name.replace("-", "_")} for name in hospitals]
    lead = {"name": LEAD, "type": "admin", "org": "consortium", "role": "lead"}
    builders = [
        {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {
            "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
            "args": {"config_folder": "config", "scheme": "tcp"},
        },
        {"path": "nvflare.lighter.impl.cert.CertBuilder"},
        {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
    ]
    return {"api_version": 3, "name": NAME, "participants": [server, *clients, lead], "builders": builders}


class Consortium:
    """Kits and the processes that run from them; ends only what it started."""

    def __init__(self, root: Path, hospitals: Sequence[str]) -> None:
        self.root, self.hospitals = root, list(hospitals)
        self.environment = {**os.environ, "HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, subprocess.Popen] = {}
        (root / "home").mkdir()
        (root / "project.yml").write_text(yaml.safe_dump(project(self.hospitals, free_port()), sort_keys=False))
        command = ["nvflare.cli", "provision", "-p", str(root / "project.yml"), "-w", str(root / "kits"), "--force"]
        subprocess.run([sys.executable, "-m", *command], check=True, env=self.environment, stdout=subprocess.DEVNULL)
        self._keep_storage_here()

    def kit(self, party: str) -> Path:
        return self.root / "kits" / NAME / "prod_00" / party

    def change_resources(self, party: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a party's local/resources.json, as its administrator would."""
        local = self.kit(party) / "local"
        own, default = local / "resources.json", local / "resources.json.default"
        resources = json.loads((own if own.exists() else default).read_text())
        change(resources)
        own.write_text(json.dumps(resources))

    def allow_medsilo(self) -> None:
        """The installed way: every party names our classes on its allow-list."""
        for party in [SERVER, *self.hospitals]:
            self.change_resources(party, lambda resources: resources["class_allow_list"].append("medsilo.flare."))

    def _keep_storage_here(self) -> None:
        def change(resources: dict[str, Any]) -> None:
            resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(self.root / "snapshots")
            for component in resources["components"]:
                if component["id"] == "job_manager":
                    component["args"]["uri_root"] = str(self.root / "jobs")

        self.change_resources(SERVER, change)

    def start(self) -> None:
        """Start everybody and wait until the hospitals are there."""
        for party in [SERVER, *self.hospitals]:
            self._start(party)
        session = self.session()
        try:
            wait_until(lambda: len(session.get_system_info().client_info) == len(self.hospitals), 60, "hospitals")
        finally:
            session.close()

    def _start(self, party: str) -> None:
        kit, is_server = self.kit(party), party == SERVER
        role = "server.server_train" if is_server else "client.client_train"
        start_file = "fed_server.json" if is_server else "fed_client.json"
        org = "consortium" if is_server else party.replace("-", "_")
        settings = ["secure_train=true", f"org={org}", "config_folder=config", *([] if is_server else [f"uid={party}"])]
        command = [sys.executable, "-m", f"nvflare.private.fed.app.{role}", "-m", str(kit), "-s", start_file, "--set"]
        with (self.root / f"{party}.log").open("a") as log:
            self.processes[party] = subprocess.Popen(
                [*command, *settings], cwd=kit, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def session(self) -> Session:
        """The lead's session with the server, as soon as it answers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return new_secure_session(LEAD, str(self.kit(LEAD)), timeout=5.0)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)

    def run(self, job: Path, timeout: float = 240) -> str:
        """Submit a job and wait; returns its final status."""
        session = self.session()
        try:
            job_id = session.submit_job(str(job))
            wait_until(lambda: str(session.get_job_status(job_id)).startswith("FINISHED"), timeout, "the job's end")
            return str(session.get_job_status(job_id))
        finally:
            session.close()

    def stop(self) -> None:
        """End every process that was started here, and their children."""
        family = []
        for process in self.processes.values():
            try:
                family += [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            except psutil.NoSuchProcess:
                continue
        for member in family:
            if member.is_running():
                member.terminate()
        for member in psutil.wait_procs(family, timeout=8)[1]:
            member.kill()


def wait_until(true: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.2)
