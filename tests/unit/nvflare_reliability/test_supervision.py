"""Test the programs that supervise a kit: systemd units, a loop that restarts, and a probe."""

import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from medsilo_lab.consortium.provision import GUARD, RUN, SERVICE
from tests.secure.consortium import wait_until
from tests.unit.medsilo_lab.test_consortium import NORTH, TOP, put
from tests.unit.medsilo_lab.test_provision import kits_of

ASKS = """
import sys; sys.path.insert(0, sys.argv[1])
from site_guard import Guard
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
said = FLContext()
Guard().handle_event(EventType.BEFORE_CHECK_RESOURCE_MANAGER, said)
print(said.get_prop("__job_block_reason"))
"""


def run(*command: object, **environment: object) -> subprocess.CompletedProcess[str]:
    changed = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run([*map(str, command)], env=changed, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervision")
    kits_of(folder, put("relays", [NORTH, TOP]))
    return folder / "kits"


def test_every_kit_that_runs_has_a_unit_that_systemd_takes(kits: Path, tmp_path: Path) -> None:
    names = ["localhost", "st-anna", "north", "relay-n", "relay-top"]
    assert {path.parent.name for path in kits.glob(f"*/{SERVICE}")} == set(names)
    units = {name: (kits / name / SERVICE).read_text().splitlines() for name in names}
    for name, lines in units.items():
        wanted = {f"ReadOnlyPaths=/srv/medsilo/{name}/local /srv/medsilo/{name}/startup", "StartLimitIntervalSec=0"}
        wanted |= {"NoNewPrivileges=yes", "ProtectSystem=strict", "User=medsilo"}
        assert wanted <= set(lines) and os.access(kits / name / RUN, os.X_OK)
    assert "ReadWritePaths=/srv/medsilo/localhost /var/lib/x" in units["localhost"]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    (tmp_path / "medsilo.service").write_text("\n".join(units["localhost"]))
    done = run("systemd-analyze", "verify", "--man=no", tmp_path / "medsilo.service")
    assert "medsilo.service" not in done.stderr, done.stderr
    exposed = run("systemd-analyze", "security", "--offline=true", "--threshold=30", tmp_path / "medsilo.service")
    assert exposed.returncode == 0, exposed.stdout[-300:]


@pytest.mark.slow
def test_the_loop_starts_again_more_than_five_times_says_so_and_ends_when_told(kits: Path, tmp_path: Path) -> None:
    """NVFlare's own loop ends after five restarts."""
    kit = tmp_path / "kit"
    (kit / "startup").mkdir(parents=True)
    shutil.copy(kits / "north" / RUN, kit / RUN)
    fake = "#!/bin/sh\necho started $1 >> starts\n[ -f ends ] && touch shutdown.fl && exit 0\n"
    fake += "[ -f stays ] && exec sleep 100\nexit 3\n"
    (kit / "startup/sub_start.sh").write_text(fake)
    (kit / "startup/sub_start.sh").chmod(0o700)
    activated = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "MEDSILO_LONGEST_WAIT": "0", "PATH": activated}
    loop = subprocess.Popen(["bash", kit / RUN], env=environment, stderr=subprocess.PIPE, text=True)
    starts = kit / "starts"
    try:
        wait_until(lambda: starts.exists() and starts.read_text().count("started --once") > 6, 600, "starts")
        (kit / "stays").touch()
        time.sleep(0.5)
        loop.send_signal(signal.SIGTERM)
        said = loop.communicate(timeout=600)[1].splitlines()
    finally:
        loop.kill()
    assert loop.returncode == 0 and sum("ended with code 3" in line for line in said) > 5
    (kit / "ends").touch()
    done = run("bash", kit / RUN, PATH=activated)
    assert done.returncode == 0 and "shut down" in done.stderr
    (kit / "ends").unlink()
    starts.unlink()
    loop = subprocess.Popen(["bash", kit / RUN], env=environment, stderr=subprocess.PIPE, text=True)
    try:  # the script stop_fl.sh writes a file shutdown.fl, but the last stop left no such file
        wait_until(starts.exists, 600, "a start")
        (kit / "shutdown.fl").touch()
        said = loop.communicate(timeout=600)[1].splitlines()
    finally:
        loop.kill()
    assert loop.returncode == 0 and len(said) == 1 and "stop_fl.sh" in said[0]


def test_the_loop_says_at_once_that_its_environment_is_not_active(kits: Path, tmp_path: Path) -> None:
    """In earlier versions, with a Python that lacks medsilo, the loop wrote the same error to a log file again and
    again.
    """
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    (tmp_path / "python3").chmod(0o700)
    done = run("bash", kits / "north" / RUN, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", PYTHONPATH="")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no nvflare" in done.stderr and "activate" in done.stderr


@pytest.mark.slow
def test_a_site_without_medsilo_says_why_it_takes_no_job(kits: Path, tmp_path: Path) -> None:
    guard = kits / "st-anna/local/custom"
    assert (guard / GUARD).exists() and not (kits / "localhost/local/custom").exists()
    assert run(sys.executable, "-c", ASKS, guard).stdout.strip() == "None"
    (tmp_path / "medsilo.py").write_text("")
    told = run(sys.executable, "-c", ASKS, guard, PYTHONPATH=tmp_path).stdout
    assert "(ModuleNotFoundError)" in told and str(tmp_path) not in told


CONNECTS = "import socket, sys, time; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


def test_a_probe_tells_who_is_up(tmp_path: Path) -> None:
    """A server that accepts connections without a TLS handshake is down.

    A hospital is up only if its kit's process is connected to the server.
    """

    def probe(kit: Path) -> tuple[int, str]:
        done = run(sys.executable, "-m", "medsilo.check.kit", kit)
        return done.returncode, done.stderr

    file = tmp_path / "kits"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        kits_of(tmp_path, put("server", "port", port), put("server", "host", "localhost"))
        code, said = probe(file / "localhost")
        assert code == 1 and "no handshake" in said
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(file / "localhost/startup/server.crt", file / "localhost/startup/server.key")

        def accept() -> None:
            with suppress(OSError):
                while True:
                    lines.append(server.accept()[0])
                    with suppress(OSError):
                        lines.append(context.wrap_socket(lines.pop(), server_side=True))

        lines = list[socket.socket]()
        threading.Thread(target=accept, daemon=True).start()
        assert probe(file / "localhost") == (0, "")
        code, said = probe(file / "st-anna")
        assert code == 1 and f"no connection to the server on port {port}" in said
        for kit, up in (("north", False), ("st-anna", True)):
            line = [CONNECTS, str(port), "nvflare.private.fed.app.client.client_train", "-m", str(file / kit)]
            with subprocess.Popen([sys.executable, "-c", *line]) as connected:
                links = psutil.Process(connected.pid)
                wait_until(lambda links=links: bool(links.net_connections("tcp")), 600, "its connection")
                assert (probe(file / "st-anna") == (0, "")) == up
                connected.kill()
        server.shutdown(socket.SHUT_RDWR)  # a thread that waits for connections would keep the socket open
    assert probe(file / "localhost")[0] == 1 and "is not a kit" in probe(tmp_path)[1]
