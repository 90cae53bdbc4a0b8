"""Processes of simulated sites as forks of one that has imported everything.

NVFlare's simulator starts a Python process for each site and, where it has fewer threads than sites, for each task of a
site. Each imports torch, NVFlare and this package again, which takes seconds of a core and hundreds of MB, and gives up
after a minute if the machine is busy with the others'. A fork has all that at once and shares its memory. The simulator
starts `sys.executable`: here that is `forked_site.py`, a small process that asks for a fork and waits for its end.
"""

import gc
import importlib
import json
import multiprocessing.spawn  # noqa: F401 (it keeps the true sys.executable)
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.lifeline import end_family
from medsilo.flare import forked_site
from medsilo.flare.forked_site import BEGUN, ENDED, LENGTH, STARTING
from medsilo.flare.patches import sites_started_by
from medsilo.plan import load_plan

AT_ONCE = 2 * (os.cpu_count() or 1)  # forks that start at the same time
POLL = 0.2  # seconds between looks at what no message tells: forks that ended, a simulator that is gone
WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
NEEDED = (WORKER, "medsilo.flare.executor")
USEFUL = ("aiohttp.web", "google.protobuf.message")  # which NVFlare's lines import, where they are installed
_fates: "Fates | None" = None  # while sites are forked that keep their processes


class Fates:
    """The fate of sites' processes, for the simulator and for the process that forks them.

    Two folders, with an empty file for each site whose process has begun its work, or has died.
    """

    def __init__(self, folder: Path) -> None:
        self.begun, self.died = folder / "begun", folder / "died"


def died() -> set[str]:
    """Return the simulated sites whose process has died; in a federation of machines NVFlare tells."""
    return {path.name for path in _fates.died.iterdir()} if _fates else set()


@contextmanager
def forked_sites(plan: Path, lasting: bool) -> Iterator[Fates]:
    """Let the simulator that runs in this process have its sites forked from one process that has read the plan.

    lasting: whether a site keeps its process, whose end is its death then.
    """
    global _fates
    with tempfile.TemporaryDirectory(prefix="medsilo-") as folder, socket.socket(socket.AF_UNIX) as listener:
        fates = Fates(Path(folder))
        fates.begun.mkdir()
        fates.died.mkdir()
        _fates = fates if lasting else None
        address = f"{folder}/forks"
        listener.bind(address)
        listener.listen(4096)  # sites may ask while everything is still being imported
        command = [sys.executable, "-m", __name__, str(listener.fileno()), str(plan), str(os.getpid())]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            with sites_started_by([sys.executable, "-I", "-S", forked_site.__file__, address]):
                yield fates
        finally:
            _fates = None
            end_family(server.pid)
            server.wait()


@dataclass(frozen=True)
class WantedProcess:
    """A process that somebody wants: its command line after `python`, its surroundings, and its stdout and stderr."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]

    @classmethod
    def read(cls, connection: socket.socket) -> "WantedProcess | None":
        """Read what one of our own small processes has sent; None if it was ended while it asked or waited."""
        length, files, _, _ = socket.recv_fds(connection, LENGTH.size, 2)
        try:
            with connection.makefile("rb") as stream:
                asked = cls(**json.loads(stream.read(*LENGTH.unpack(length))), files=files)
            if not select.select([connection], [], [], 0)[0]:
                return asked
        except (struct.error, ValueError):  # only a part has come
            pass
        for file in files:
            os.close(file)
        return None

    @property
    def site(self) -> str:
        """The name of the site whose process it is."""
        return self.arguments[self.arguments.index("--client") + 1]

    def run(self, starting: int, begun: Path) -> None:
        """Be that process; when it has started, the file `starting` is to be closed and `begun` to be made."""
        os.setsid()
        for own, file in enumerate(self.files, start=1):
            os.dup2(file, own)
        os.environ.clear()
        os.environ.update(self.environment, **{STARTING: str(starting), BEGUN: str(begun)})
        os.chdir(self.folder)
        _, module, *sys.argv[1:] = self.arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkServer:
    """Forks for whoever asks, tells them how their fork ended, and ends it when they are gone.

    Only a few start at a time: with a hundred at once none is there before NVFlare gives it up.
    """

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self._listener, self._parent = listener, parent
        self._forks: dict[int, socket.socket] = {}  # who asked, by process
        self._sites: dict[int, str] = {}  # by process, if its death is to be noted
        self._fates = Fates(Path(listener.getsockname()).parent)
        self._starting: list[int] = []  # files that end when a fork has started

    def serve(self) -> None:
        """Serve until the simulator is gone; each fork runs what was asked for, and ends here."""
        while os.getppid() == self._parent:
            watched: list[socket.socket | int] = [*self._forks.values(), *self._starting]
            if len(self._starting) < AT_ONCE:
                watched.append(self._listener)
            ready, _, _ = select.select(watched, [], [], POLL)
            for file in [file for file in self._starting if file in ready]:
                self._starting.remove(file)
                os.close(file)
            for pid, connection in self._forks.items():
                if connection in ready:  # it says nothing more: its process is gone
                    self._give_up(pid)
            if self._listener in ready:
                connection, _ = self._listener.accept()
                asked = WantedProcess.read(connection)
                if not asked:
                    connection.close()
                elif starting := self._fork(asked, connection):
                    asked.run(starting, self._fates.begun / asked.site)
                    return
            self._tell_ended()
        end_family(os.getpid())

    def _fork(self, asked: WantedProcess, connection: socket.socket) -> int:
        """Fork; return in the fork the file to be closed when it has started, and 0 in this process."""
        has_started, starting = os.pipe()
        (self._fates.died / asked.site).unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            self._forget(connection, has_started)
            return starting
        self._forks[pid], self._sites[pid] = connection, asked.site
        self._starting.append(has_started)
        for file in (*asked.files, starting):
            os.close(file)
        return 0

    def _give_up(self, pid: int) -> None:
        """End a fork whose asker is gone; one that has not started may be asked for again, and has not died."""
        if pid in self._sites and not (self._fates.begun / self._sites[pid]).exists():
            del self._sites[pid]
        os.kill(pid, signal.SIGKILL)

    def _forget(self, connection: socket.socket, has_started: int) -> None:
        for one in (self._listener, connection, *self._forks.values()):
            one.close()
        for file in (has_started, *self._starting):
            os.close(file)

    def _tell_ended(self) -> None:
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            site = self._sites.pop(pid, None)
            if status and site:
                (self._fates.died / site).touch()
            with self._forks.pop(pid) as connection, suppress(OSError):
                connection.sendall(ENDED.pack(os.waitstatus_to_exitcode(status)))


def main() -> None:
    """Import what sites need, and fork."""
    listener, plan, parent = sys.argv[1:]
    for module in NEEDED:
        importlib.import_module(module)
    for module in USEFUL:
        with suppress(ImportError):
            importlib.import_module(module)
    with suppress(MedsiloError):  # whoever runs the plan says what is wrong with it
        load_plan(Path(plan))
    del sys.modules[WORKER]  # it is run as a program
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all pages that it shares
    ForkServer(socket.socket(fileno=int(listener)), int(parent)).serve()


if __name__ == "__main__":
    main()
