"""The most memory that this process has held, and blocks that it gives back."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for them
LARGE = 8 << 20  # bytes; a piece has 5 million


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
    """Use blocks of the size of a message's pieces again, and give larger ones back to the system at once.

    Else glibc, once it has seen a block of up to 32 MiB freed, keeps such blocks in a store of each thread. The system
    zeroes whatever it gives, page by page: so what comes and goes all the time stays.
    """
    with suppress(OSError, AttributeError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(MMAP_THRESHOLD, LARGE)
        set_option(TRIM_THRESHOLD, 4 * LARGE)
