"""Start simulated sites as forks of one process that has already imported all modules (Python's fork server).

NVFlare's simulator starts a Python process for each site, or for each task of a site if there are fewer threads than
sites. Each process imports PyTorch, NVFlare and the application. The imports take seconds of processor time and
hundreds of megabytes, and can exceed the simulator's time limit of a minute. A fork needs no imports, and shares the
memory of the modules.

The first round with 3 sites takes 12.8 s of processor time and 1.1 GB without forks, and 8.9 s and 0.9 GB with forks.
The first round with 16 sites takes 51.7 s and 4.0 GB without forks, and 19.8 s and 1.7 GB with forks.
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

# Maximum number of sites that start at the same time. If a hundred sites started at once, every site would exceed
# NVFlare's time limit for the start.
AT_ONCE = 2 * (os.cpu_count() or 1)
POLL = 0.2  # seconds between two checks whether a process has started or ended
SHARED = (SITE_PROCESS, "aiohttp.web", "google.protobuf.message")  # modules that every simulated site imports
_starting = threading.BoundedSemaphore(AT_ONCE)


class ForkedSite:
    """The process of a simulated site. The class has the methods of `Popen` that NVFlare calls.

    At most AT_ONCE processes start at the same time.
    """

    context: Any
    lasting = False  # True if a site keeps its process for the whole job; an early end of the process is then a failure

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **ignored: Any) -> None:
        _starting.acquire()
        self.begun, self.given_up, self._looking = False, False, threading.Lock()
        # a pipe shows that the process was killed, but an Event would not show that
        self._told, tells = self.context.Pipe(duplex=False)
        self._process = self.context.Process(target=_be_site, args=([*command[1:]], dict(env), str(Path.cwd()), tells))
        self._process.start()
        tells.close()
        forked.SITES[command[command.index("--client") + 1]] = self
        threading.Thread(target=self._let_others_start, daemon=True).start()
        self.terminate = self.kill = self._process.kill

    def _let_others_start(self) -> None:
        while not self._told.poll(POLL) and self.poll() is None:
            pass
        with suppress(EOFError):  # the process may die before it reports that it has started
            self.begun = self._told.poll() and bool(self._told.recv_bytes())
        _starting.release()

    def poll(self) -> int | None:
        """Return the process's exit code, or None while the process runs. Several threads may call this method."""
        with self._looking:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    @property
    def has_died(self) -> bool:
        """True if the process has died, so that the site sends no more messages."""
        return self.lasting and (self.given_up or (self.begun and bool(self.poll())))

    def wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(POLL)


def begin(modules: Sequence[str], lasting: bool) -> None:
    """Start the fork server, which imports modules while NVFlare starts.

    Args:
        lasting: True if each site keeps its process for the whole job.
    """
    from multiprocessing.forkserver import ensure_running

    ForkedSite.context, ForkedSite.lasting = multiprocessing.get_context("forkserver"), lasting
    ForkedSite.context.set_forkserver_preload([*SHARED, *modules])
    ensure_running()


def _be_site(arguments: Sequence[str], environment: Mapping[str, str], folder: str, begun: Connection) -> None:
    forked.begun = begun
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules.pop(SITE_PROCESS, None)  # a fork will run this module again as its main program
    _, module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
