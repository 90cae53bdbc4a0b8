"""End a process when its parent dies, and measure the process's peak memory.

A thread regularly checks whether the process's parent has changed. Linux's signal PR_SET_PDEATHSIG can't replace this
thread for NVFlare's jobs: Linux sends the signal when the thread that started the process ends. NVFlare starts jobs
from short-lived threads.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

POLL = 0.5  # seconds between two checks
# identifiers of the processes that have started a watching thread; the thread does not exist in a forked child process
_watching: set[int] = set()


def end_with(parent: int) -> None:
    """Start a thread that kills this process and its descendants as soon as `parent` is no longer the parent."""
    if os.getpid() not in _watching:
        _watching.add(os.getpid())
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    end_family(os.getpid())


def end_family(pid: int) -> None:
    """Kill all descendants of a process, and then the process itself; the process may be the one that calls this
    function.
    """
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        while children := first.children(recursive=True):
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            if not psutil.wait_procs(children, timeout=1)[0]:
                # Linux can't kill a process while the process waits for a disk.
                break
        first.kill()


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's codes for the options M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
LARGE = 32 << 20  # bytes; glibc accepts no value of M_MMAP_THRESHOLD above this number


def most_held() -> int:
    """Return this process's peak memory in bytes since the last call of `forget_most`, or, without such a call, since
    the process started.

    If the operating system records no peak, the function returns this process's present memory.
    """
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return psutil.Process().memory_info().rss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_most() -> None:
    """Reset this process's recorded peak memory to its present memory, if the operating system supports this."""
    with suppress(OSError):
        FORGET.write_text("5")


def reuse_blocks() -> None:
    """Let the C library reuse freed memory blocks of at most `LARGE` bytes, and return larger blocks to the system.

    Reusing freed memory saves time, because the operating system fills each page of new memory with zeros.
    """
    with suppress(OSError, AttributeError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(MMAP_THRESHOLD, LARGE)
        set_option(TRIM_THRESHOLD, 4 * LARGE)
