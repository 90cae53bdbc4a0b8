"""Processes that end with the one that started them, however that one dies; and the memory that this one has held.

Linux's own signal for this (PR_SET_PDEATHSIG) comes when the thread ends that started a process, and NVFlare starts
jobs from threads that end early. So a thread here looks whether the parent is still the same, which works anywhere.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

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


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for them
LARGE = 32 << 20  # bytes; a reply with pieces has 8 million, and glibc takes no more


def most_held() -> int:
    """In bytes, since `forget_most` or the process's beginning; where the system does not tell, what it holds now."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return psutil.Process().memory_info().rss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_most() -> None:
    """Look at what comes from now on, where the system can."""
    with suppress(OSError):
        FORGET.write_text("5")


def reuse_blocks() -> None:
    """Use blocks of a message's size again, and give larger ones back to the system at once.

    The system zeroes whatever it gives, page by page: so what comes and goes all the time stays.
    """
    with suppress(OSError, AttributeError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(MMAP_THRESHOLD, LARGE)
        set_option(TRIM_THRESHOLD, 4 * LARGE)
