"""Processes that end with the one that started them, however that one dies.

Linux's own signal for this (PR_SET_PDEATHSIG) comes when the thread ends that started a process, and NVFlare starts
jobs from threads that end early. So a thread here looks whether the parent is still the same, which works anywhere.
"""

import os
import threading
import time
from contextlib import suppress

import psutil

POLL = 0.5  # seconds between two looks
_watching: set[int] = set()  # this process, once it looks; a fork of it has another number and looks for itself


def end_with(parent: int) -> None:
    """End this process and all that it started, without a word, as soon as `parent` no longer is its parent."""
    if os.getpid() not in _watching:
        _watching.add(os.getpid())
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    end_family(os.getpid())


def end_family(pid: int) -> None:
    """Kill a process and all that it started, the first one last: it may be this one."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        while children := first.children(recursive=True):
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            if not psutil.wait_procs(children, timeout=1)[0]:
                break  # what can't be killed now, as a process that waits for a disk, is the system's
        first.kill()
