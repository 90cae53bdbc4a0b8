"""Test connections to the metrics endpoint, and the watch program's reading of the webhook's URL from a file."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError
from provisioning import metrics
from tests.secure.consortium import wait_until
from tests.unit.site.test_approvals import make_kit


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return make_kit(tmp_path / "kit", "hospital-a").kit


def test_a_webhooks_url_is_no_argument(tmp_path: Path) -> None:
    """The webhook's URL is not an argument, because each account on a machine can read other accounts' arguments.

    Error messages do not contain the webhook's URL.
    """
    (tmp_path / "url").write_text("https://chat.example/hooks/secret\n")
    assert metrics._url(tmp_path / "url") == "https://chat.example/hooks/secret" and metrics._url(None) == ""
    (tmp_path / "clear").write_text("http://chat.example/hooks/secret")
    wrong = [
        Path("https://chat.example/hooks/secret"),
        tmp_path / "clear",
        tmp_path,
        tmp_path / "none",
        Path("/dev/zero"),
    ]
    for given in wrong:
        with pytest.raises(MedsiloError) as told:
            metrics._url(given)
        assert "secret" not in str(told.value)


@contextmanager
def endpoint(kit: Path) -> Iterator[int]:
    server = metrics.Endpoint(0, metrics._handler(kit, 0.0))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def asked(port: int, host: str = "") -> int:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("GET", "/healthz", headers={"Host": host} if host else {})
        return line.getresponse().status
    finally:
        line.close()


@pytest.mark.slow
def test_silent_connections_take_no_threads_and_close_nothing(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint answers other requests while 300 connections send nothing or one letter at long intervals."""
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    monkeypatch.setattr(metrics, "PATIENCE", 1.0)
    with endpoint(kit) as port, ExitStack() as idle:
        before = threading.active_count()
        lines = [idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(300)]
        assert asked(port) == 200
        assert threading.active_count() <= before + metrics.MOST_AT_ONCE + 1
        slow = lines[-1]
        with suppress(ConnectionError):
            for _ in range(100):
                slow.sendall(b"G")
                time.sleep(0.05)
        for line in lines:
            with suppress(ConnectionError):
                assert line.recv(10) == b""
        wait_until(lambda: threading.active_count() <= before, 60, "the threads' end")
        assert asked(port) == 200


def test_only_this_machines_own_address_is_answered(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script on a web page, whose host name resolves to this machine, sends a request; the endpoint must reject the
    request.
    """
    monkeypatch.setattr(metrics, "trouble", lambda party: None)
    with endpoint(kit) as port:
        hosts = {"": 200, "localhost:9000": 200, "127.0.0.1": 200, f"[::1]:{port}": 200, f"evil.example:{port}": 421}
        assert {host: asked(port, host) for host in hosts} == hosts
        assert asked(port, "127.0.0.1.evil.example") == 421
