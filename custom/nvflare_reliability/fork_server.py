"""Processes of simulated sites as forks of one that has imported everything: Python's own fork server.

NVFlare's simulator starts a Python process for each site and, where it has fewer threads than sites, for each task of a
site. Each imports torch, NVFlare and the application anew, which takes seconds of a core and hundreds of MB, and gives
up after a minute if the machine is busy with the others'. A fork has all that at once and shares its memory.

Measured up to the end of the first round, without and with it: 3 sites take 12.8 and 8.9 s of a processor, and 1.1 and
0.9 GB; 16 sites take 51.7 and 19.8 s, and 4.0 and 1.7 GB.
"""

import multiprocessing
import os
import runpy
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nvflare_reliability import forked
from nvflare_reliability.kit_patches import SITE_PROCESS

AT_ONCE = 2 * (os.cpu_count() or 1)  # that start at the same time: with a hundred, none is there before it is given up
POLL = 0.2  # seconds between two looks
SHARED = (SITE_PROCESS, "aiohttp.web", "google.protobuf.message")  # what NVFlare's lines import
_starting = threading.BoundedSemaphore(AT_ONCE)


class ForkedSite:
    """A site's process, in the form of the one that NVFlare starts; it begins when not too many others are starting."""

    context: Any  # multiprocessing's, which Windows has not
    lasting = False  # whether a site keeps its process, whose end is its death then

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **ignored: Any) -> None:
        _starting.acquire()
        self.begun, self.given_up, self._looking = False, False, threading.Lock()
        self._told, tells = self.context.Pipe(duplex=False)  # an Event would outlive a process that is killed
        self._process = self.context.Process(target=_be_site, args=([*command[1:]], dict(env), str(Path.cwd()), tells))
        self._process.start()
        tells.close()
        forked.SITES[command[command.index("--client") + 1]] = self
        threading.Thread(target=self._let_others_start, daemon=True).start()
        self.terminate = self.kill = self._process.kill

    def _let_others_start(self) -> None:
        while not self._told.poll(POLL) and self.poll() is None:
            pass
        with suppress(EOFError):  # it died before it had begun
            self.begun = self._told.poll() and bool(self._told.recv_bytes())
        _starting.release()

    def poll(self) -> int | None:
        """Return how it ended; None while it runs. Several threads ask."""
        with self._looking:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """The same."""
        return self.poll()

    @property
    def has_died(self) -> bool:
        """Return whether nothing more can come of the site."""
        return self.lasting and (self.given_up or (self.begun and bool(self.poll())))

    def wait(self, timeout: float) -> None:
        """Wait until it has ended, for so many seconds at most."""
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(POLL)


def begin(modules: Sequence[str], lasting: bool) -> None:
    """Have sites forked from one process that imports these modules while NVFlare starts.

    lasting: whether a site keeps its process
    """
    from multiprocessing.forkserver import ensure_running  # which Windows has not

    ForkedSite.context, ForkedSite.lasting = multiprocessing.get_context("forkserver"), lasting
    ForkedSite.context.set_forkserver_preload([*SHARED, *modules])
    ensure_running()


def _be_site(arguments: Sequence[str], environment: Mapping[str, str], folder: str, begun: Connection) -> None:
    forked.begun = begun
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules.pop(SITE_PROCESS, None)  # it is run as a program
    _, module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
