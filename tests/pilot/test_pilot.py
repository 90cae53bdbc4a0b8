"""Follow docs/study/consortium.md literally on six simulated machines, each with an address, an account, a disk and a
clock.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from medsilo.runs.reading import read_summary

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/study/consortium.md"
HOSPITALS = ("st-anna", "st-bruno", "st-clara")
PULLED = 30.0  # seconds for which the network cable is unplugged
OLD, NEW = "the server", "the new server"
# The seconds by which each machine's clock is wrong.
CLOCKS = {OLD: 0, NEW: 20, "the lead": -200, "st-anna": 3600, "st-bruno": -95, "st-clara": 40}
KIT = "kits/lead@clinic.example"
BLOCK = re.compile(r"^```(yaml)?\n(.*?)^```$", re.M | re.S)
# each machine has a separate disk; root's home folder is hidden, except for the Python installation in this folder
INSIDE = (
    "mount -t tmpfs -o mode=755 tmpfs /srv && mkdir /srv/medsilo /srv/python && mount --bind {home} /srv/medsilo "
    "&& mount --bind {python} /srv/python && mount -t tmpfs -o mode=755 tmpfs /root && mkdir -p {python} "
    "&& mount --bind /srv/python {python} && cd /srv/medsilo "
    "&& exec setpriv --reuid={uid} --regid={uid} --clear-groups env -i {environment} bash -euo pipefail -c {command}"
)


def needs() -> str:
    programs = [name for name in ("ip", "bridge", "setpriv", "cc") if not shutil.which(name)]
    if programs:
        return f"needs {', '.join(programs)}"
    if os.geteuid() or subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        return "needs the right to make network namespaces"
    return ""


class Machine:
    """A network namespace that stands for a machine with an address, an account, a disk and a clock."""

    def __init__(self, name: str, number: int, line: str, folder: Path) -> None:
        self.name, self.uid, self.home = name, 61000 + number, folder / name.replace(" ", "-")
        self.namespace, self.address, self.port = f"{line}{number}", f"10.77.0.{number}", f"p{number}"
        self.home.mkdir()
        os.chown(self.home, self.uid, self.uid)
        shutil.copy(folder / "clock.so", self.home)
        ip("netns", "add", self.namespace)
        ip("-n", line, "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("-n", line, "link", "set", self.port, "master", "hub", "up")
        for what in (["address", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            ip("-n", self.namespace, *what)
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def types(self, command: str, timeout: float = 600) -> str:
        own = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": "/srv/medsilo",
            "USER": self.name,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "LD_PRELOAD": "/srv/medsilo/clock.so",
            "CLOCK_SHIFT": str(CLOCKS[self.name]),
        }
        quoted = " ".join(f"{key}='{value}'" for key, value in own.items())
        inside = INSIDE.format(python=sys.base_prefix, home=self.home, uid=self.uid, environment=quoted, command='"$1"')
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "sh", "-c", inside, "sh", command],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{self.name} typed\n{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.home.glob("*.log"))

    def sends(self, file: str, *others: "Machine") -> None:
        for other in others:
            shutil.copy(self.home / file, other.home / file)
            os.chown(other.home / file, other.uid, other.uid)

    def ends(self) -> None:
        for process in psutil.process_iter(["uids"]):
            if process.info["uids"] and process.info["uids"].real == self.uid:
                process.send_signal(signal.SIGKILL)


def name_leads_to(address: str, hosts: Iterable[Path]) -> None:
    for path in hosts:
        path.write_text(f"127.0.0.1 localhost\n{address} fl.example.org\n")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    if lacks := needs():
        pytest.skip(lacks)
    line, names = "medsilopilot", (OLD, NEW, "the lead", *HOSPITALS)
    folder = Path(tempfile.mkdtemp(prefix="pilot-"))
    folder.chmod(0o755)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "clock.so", Path(__file__).with_name("clock.c")], check=True
    )
    made: dict[str, Machine] = {}
    hosts = [Path(f"/etc/netns/{line}{number}/hosts") for number in range(1, len(names) + 1)]
    try:
        for path in hosts:
            path.parent.mkdir(parents=True)
        name_leads_to("10.77.0.1", hosts)
        ip("netns", "add", line)
        ip("-n", line, "link", "add", "hub", "type", "bridge")
        ip("-n", line, "link", "set", "hub", "up")
        for number, name in enumerate(names, 1):
            made[name] = Machine(name, number, line, folder)
        for name in names[2:]:  # the firewall allows connections to the servers only
            subprocess.run(["bridge", "-n", line, "link", "set", "dev", made[name].port, "isolated", "on"], check=True)
        yield made
    finally:
        for machine in made.values():
            machine.ends()
            ip("netns", "delete", machine.namespace)
        ip("netns", "delete", line)
        for path in hosts:
            shutil.rmtree(path.parent)
        shutil.rmtree(folder)


def steps() -> Iterator[tuple[str, str]]:
    for yaml, text in BLOCK.findall(PAGE.read_text("utf-8")):
        if yaml:
            yield "the lead", f"cat > consortium.yaml <<'END'\n{text}END\n"
        elif text.startswith("# "):
            who, _, commands = text[2:].partition("\n")
            yield who, commands


def patients(machine: Machine, seed: int) -> None:
    dice, data = random.Random(seed), machine.home / "data"
    data.mkdir()
    rows = ["patient,age,size,outcome"]
    for number in range(60 + 10 * seed):
        age, size = dice.randint(30, 90), dice.uniform(5, 60)
        rows.append(f"p{number:03d},{age},{size:.1f},{int(size + age / 3 + dice.gauss(0, 8) > 52)}")
    (data / "patients.csv").write_text("\n".join(rows) + "\n")


def pulls_the_cable(machine: Machine, line: str) -> None:
    time.sleep(6)
    ip("-n", line, "link", "set", machine.port, "down")
    time.sleep(PULLED)
    ip("-n", line, "link", "set", machine.port, "up")


def reaches(machine: Machine, address: str, port: int) -> bool:
    tries = f"import socket; socket.create_connection(('{address}', {port}), 2)"
    try:
        machine.types(f'python -c "{tries}"')
    except AssertionError:
        return False
    return True


@pytest.mark.long
def test_the_pilot_by_its_text_alone(machines: dict[str, Machine]) -> None:
    lead, server, hospitals = machines["the lead"], machines[OLD], [machines[name] for name in HOSPITALS]
    for seed, hospital in enumerate(hospitals, 1):
        patients(hospital, seed)
    post = {f"{machine.name}.tgz": [machine] for machine in hospitals}
    post |= {"fl.example.org.tgz": [server], "plan.tgz": [lead], "job.tgz": hospitals, "backup-1.zip": [machines[NEW]]}
    study, typed = "", 0
    for who, commands in steps():
        if who == NEW:
            server.ends()
            shutil.rmtree(server.home)
            name_leads_to(machines[NEW].address, Path("/etc/netns").glob("medsilopilot*/hosts"))
        parties = hospitals if who == "each hospital" else [machines[who]]
        for party in parties:
            text = commands.replace("st-anna", party.name) if who == "each hospital" else commands
            for line in [text] if "<<" in text or "\\\n" in text else text.splitlines():
                cable = None
                if "--watch" in line:
                    cable = threading.Thread(target=pulls_the_cable, args=(hospitals[1], "medsilopilot"))
                    cable.start()
                began = time.monotonic()
                said = party.types(line.replace(" ID ", f" {study} "))
                print(f"{time.monotonic() - began:6.1f} s  {party.name}: {line.splitlines()[0]}")
                typed += 1
                if cable:
                    cable.join()
                if line.startswith("medsilo submit") and "--kit" in line:
                    study = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", said)[-1]
        for made in [name for name in post if (machines.get(who, hospitals[0]).home / name).exists()]:
            party = machines.get(who, hospitals[0])
            party.sends(made, *[to for to in post[made] if to is not party])
        if any("status" in line for line in commands.splitlines()) and not study:
            assert reaches(hospitals[0], server.address, 8002)
            assert not reaches(hospitals[0], lead.address, 8002)
    told = {machine.name: float(machine.types("python -c 'import time; print(time.time())'")) for machine in hospitals}
    assert 3500 < told["st-anna"] - told["st-clara"] < 3600 and told["st-clara"] > told["st-bruno"] + 100
    summary = read_summary(next((lead.home / "runs").rglob("summary.json")).parent)
    assert summary.finished and {*summary.sites} == {*HOSPITALS}
    assert not any(one.missed for one in summary.sites.values()), "no site missed a round without the cable"
    for hospital in hospitals:
        assert any((hospital.home / "alone").rglob("summary.json"))
    assert typed > 30
    restored = time.monotonic()
    lead.types(f"until medsilo status --kit {KIT} --require {','.join(HOSPITALS)}; do sleep 5; done")
    assert study in lead.types(f"medsilo status --kit {KIT}")
    lead.types(f"medsilo download {study} --kit {KIT} -o again")
    assert read_summary(next((lead.home / "again").rglob("summary.json")).parent).finished
    print(f"{time.monotonic() - restored:6.1f} s until the restored server had all hospitals, and gave out the study")
