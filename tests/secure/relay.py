"""A TCP relay on this machine between a kit and the server, which a test can cut."""

import contextlib
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Self


class Relay:
    """Passes bytes to `target`; while cut it drops every connection and takes no new one."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.open: list[socket.socket] = []
        self.listener: socket.socket | None = None
        self.port = 0
        self.mend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()

    def kit(self, kit: Path, copy: Path) -> Path:
        """A copy of a person's kit that goes through this relay; without the root's signature over its address."""
        shutil.copytree(kit, copy)
        (copy / "startup/signature.json").unlink()
        path = copy / "startup/fed_admin.json"
        values = json.loads(path.read_text())
        values["admin"]["port"] = self.port
        path.write_text(json.dumps(values))
        return copy

    def take_in(self, startup: Path) -> None:
        """A hospital reaches the server through this relay from its next start on; unsigned, since it is changed."""
        (startup / "signature.json").unlink(missing_ok=True)
        path = startup / "fed_client.json"
        values = json.loads(path.read_text())
        values["servers"][0]["service"]["target"] = f"localhost:{self.port}"
        path.write_text(json.dumps(values))

    def mend(self) -> None:
        """Listen, on the same port as before."""
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        """Close everything."""
        if self.listener:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None
        for end in self.open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.target))
                self.open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
