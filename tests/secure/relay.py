"""A TCP relay on this machine between a kit and the server; tests cut the relay, slow it down and make it lose
packets.
"""

import contextlib
import json
import math
import random
import shutil
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from time import monotonic, sleep
from typing import Self

SEGMENT = 1448  # bytes of payload in one packet
PIECE = 11 * SEGMENT  # bytes that the relay forwards at once
AHEAD = 64  # largest number of pieces of data in transit


@dataclass(frozen=True)
class Line:
    """The quality of a network connection, which is the same in both directions.

    A lost packet costs one more round trip, and all later packets wait for the lost packet, as in TCP.
    """

    rate: float = math.inf  # bytes per second
    delay: float = 0.0  # seconds that a byte takes from one end of the connection to the other
    loss: float = 0.0  # fraction of lost packets


class _Direction:
    def __init__(self, line: Line) -> None:
        self.line, self.lock, self.dice = line, threading.Lock(), random.Random(0)
        self.free = 0.0
        self.passed = 0
        self.passes = threading.Event()
        self.passes.set()

    def arrival(self, size: int) -> float:
        with self.lock:
            packets = -(-size // SEGMENT)
            lost = sum(self.dice.random() < self.line.loss for _ in range(packets))
            self.passed += size
            self.free = max(self.free, monotonic()) + size / self.line.rate + lost * 2 * self.line.delay
            return self.free + self.line.delay


def _pass(source: socket.socket, sink: socket.socket, direction: _Direction) -> None:
    on_their_way: Queue[tuple[float, bytes]] = Queue(AHEAD)
    threading.Thread(target=_arrive, args=(on_their_way, sink, direction), daemon=True).start()
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE):
            on_their_way.put((direction.arrival(len(data)), data))
    on_their_way.put((0.0, b""))


def _arrive(on_their_way: Queue[tuple[float, bytes]], sink: socket.socket, direction: _Direction) -> None:
    """Write each piece of data at its time of arrival until the stream ends; drop the data if the receiver has closed
    the connection.
    """
    gone = False
    while (piece := on_their_way.get())[1]:
        arrives, data = piece
        if gone:
            continue
        sleep(max(0.0, arrives - monotonic()))
        direction.passes.wait()
        try:
            sink.sendall(data)
        except OSError:
            gone = True
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class Relay:
    """Forwards bytes to `target`; a cut relay drops every connection and accepts no new connection."""

    def __init__(self, target: int, line: Line | None = None) -> None:
        self.target, self.line = target, line or Line()
        self.open: list[socket.socket] = []
        self.listener: socket.socket | None = None
        self.port = 0
        self.up, self.down = _Direction(self.line), _Direction(self.line)
        self.mend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()

    def kit(self, kit: Path, copy: Path) -> Path:
        """Copy a person's kit without the kit's signature, and set this relay as the server address in the copy."""
        shutil.copytree(kit, copy)
        (copy / "startup/signature.json").unlink()
        path = copy / "startup/fed_admin.json"
        values = json.loads(path.read_text())
        values["admin"]["port"] = self.port
        path.write_text(json.dumps(values))
        return copy

    def take_in(self, startup: Path) -> None:
        """Set this relay as the server address in a hospital's kit, and remove the kit's signature, which no longer
        matches.
        """
        (startup / "signature.json").unlink(missing_ok=True)
        path = startup / "fed_client.json"
        values = json.loads(path.read_text())
        values["servers"][0]["service"]["target"] = f"localhost:{self.port}"
        path.write_text(json.dumps(values))

    def mend(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        if self.listener:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None
        for end in self.open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.clear()

    def hush(self) -> None:
        """Forward no data but keep connections open, as a failing VPN does."""
        for way in (self.up, self.down):
            way.passes.clear()

    def speak(self) -> None:
        for way in (self.up, self.down):
            way.passes.set()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self.open += [near, far]
                for way in ((near, far, self.up), (far, near, self.down)):
                    threading.Thread(target=_pass, args=way, daemon=True).start()
