"""End a process when its parent dies, and measure the process's peak memory.

Linux sends its signal for this (PR_SET_PDEATHSIG) when the starting thread ends, and NVFlare starts jobs from
short-lived threads. So a thread checks regularly whether the parent has changed.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

POLL = 0.5  # seconds between two checks
# processes with a watching thread; a forked child has another number, and starts its own thread
_watching: set[int] = set()


def end_with(parent: int) -> None:
    """End this process and its descendants silently when `parent` is no longer its parent."""
    if os.getpid() not in _watching:
        _watching.add(os.getpid())
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    end_family(os.getpid())


def end_family(pid: int) -> None:
    """Kill all descendants of a process and finally the process itself, which may be the current process."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        while children := first.children(recursive=True):
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            if not psutil.wait_procs(children, timeout=1)[0]:
                # A process that waits for a disk, for example, can't be killed now.
                break
        first.kill()


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of these options
LARGE = 32 << 20  # bytes; the largest threshold that glibc accepts


def most_held() -> int:
    """Return this process's peak memory in bytes since `forget_most` or its start, or its present memory if the system
    records no peak."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return psutil.Process().memory_info().rss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_most() -> None:
    """Reset this process's peak memory, if the system supports it."""
    with suppress(OSError):
        FORGET.write_text("5")


def reuse_blocks() -> None:
    """Let the C library reuse memory blocks of a message's size, and return larger blocks to the system.

    Reuse saves time, because the system zeroes new memory page by page.
    """
    with suppress(OSError, AttributeError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(MMAP_THRESHOLD, LARGE)
        set_option(TRIM_THRESHOLD, 4 * LARGE)
