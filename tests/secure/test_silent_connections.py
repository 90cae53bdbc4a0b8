"""Hold hundreds of silent connections to the server for SECONDS (default 60), and replace connections that end."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from medsilo import cli
from medsilo.check.kit import read_kit, trouble
from medsilo.runs import event_reading
from tests.conftest import SITES
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("pair")]
# two numbers: the silent connections, and the largest delay in seconds until a hospital has joined
MANY, JOINS = 500, 5.0
GROWTH = 40e6  # the memory of the server's main process may grow by at most this number of bytes


@contextmanager
def held(port: int, many: int) -> Iterator[list[int]]:
    over, made = threading.Event(), [0]

    def hold(own: int) -> None:
        lines: list[socket.socket | None] = [None] * own
        while not over.is_set():
            for number, line in enumerate(lines):
                if line is not None and not _has_ended(line):
                    continue
                lines[number] = None
                with suppress(OSError):
                    lines[number] = socket.create_connection(("127.0.0.1", port), 5.0)
                    made[0] += 1
            over.wait(0.5)
        for line in filter(None, lines):
            line.close()

    holding = [threading.Thread(target=hold, args=(many // 10,)) for _ in range(10)]
    for thread in holding:
        thread.start()
    try:
        yield made
    finally:
        over.set()
        for thread in holding:
            thread.join()


def _has_ended(line: socket.socket) -> bool:
    try:
        if line.recv(1, socket.MSG_DONTWAIT):
            return False
    except BlockingIOError:
        return False
    except OSError:
        pass
    line.close()
    return True


def joining(consortium: Consortium, site: str) -> float:
    consortium.kill(site)
    before, at = len(consortium.log(site)), time.monotonic()
    consortium.start_party(site)
    consortium.wait_for_log(site, REGISTERED, before)
    return time.monotonic() - at


def test_hundreds_of_silent_connections_keep_nobody_out(pair: Consortium, capsys: pytest.CaptureFixture[str]) -> None:
    site, kit, seconds = SITES[0], Path(pair.kit(SERVER)), float(os.environ.get("SECONDS", "60"))
    usual, server = joining(pair, site), psutil.Process(pair.processes[SERVER].pid)
    with held(pair.port, MANY) as made:
        time.sleep(5)
        first, until, took, sizes = server.memory_info().rss, time.monotonic() + seconds, list[float](), list[int]()
        while not took or time.monotonic() < until:
            took.append(joining(pair, site))
            sizes.append(server.memory_info().rss)
            assert trouble(read_kit(kit)) is None
            at = time.monotonic()
            assert cli.main(["status", "--kit", str(pair.kit(LEAD))]) == 0
            assert time.monotonic() - at < 15
        pair.kill(SERVER)  # the restarted server gets the silent connections before any hospital's connection
        pair.start_party(SERVER)
        pair.await_hospitals()
    with capsys.disabled():
        said = f"{made[0]} silent connections, joined in {max(took):.1f} s at most, {usual:.1f} s without them"
        print(f"\n{said}; server {first / 1e6:.0f} to {max(sizes) / 1e6:.0f} MB")
    assert max(took) < usual + JOINS and max(sizes) - first < GROWTH
    assert not [line for line in event_reading.read(kit) if "\taway\t" in line and SITES[1] in line]
