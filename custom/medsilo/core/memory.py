"""The most memory that this process has held, and blocks that it gives back."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MMAP_THRESHOLD = -3  # glibc's name for it
LARGE = 1 << 20  # bytes


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


def give_large_blocks_back() -> None:
    """Give the system each large block back as soon as it is free.

    Else glibc, once it has seen a block of up to 32 MiB freed, keeps such blocks in a store of each thread.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
