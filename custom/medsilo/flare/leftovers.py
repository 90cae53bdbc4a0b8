"""Bound what NVFlare holds of each message that it sends, and free in time what it leaves behind.

NVFlare 2.9 gives every message, however small, a buffer of a megabyte, and both stay in a circle of objects until
Python looks for circles. In a process with many objects, it does that after hundreds of messages.
"""

import gc
import threading

from nvflare.fuel.f3.cellnet.cell import Cell

BUFFER = 1 << 18  # bytes, in addition to a message's own; larger messages are sent in pieces of this size
MOST = 64 << 20  # bytes that may be left behind


def hold_less(cell: Cell) -> None:
    """Make the buffers of a cell smaller."""
    cell.byte_streamer.chunk_size = BUFFER


class Leftovers:
    """Bytes that are left behind in this process, about."""

    def __init__(self) -> None:
        self._bytes, self._lock = 0, threading.Lock()

    def begin(self) -> None:
        """Let circles be looked for among what comes from now on, so that it takes no time."""
        gc.collect()
        gc.freeze()

    def sent(self, size: int = 0) -> None:
        """Count a message that was sent, of so many bytes, and free what is left behind when it is too much."""
        with self._lock:
            self._bytes += BUFFER + size
            much = self._bytes >= MOST
            if much:
                self._bytes = 0
        if much:
            gc.collect()


LEFTOVERS = Leftovers()  # a process has one job
