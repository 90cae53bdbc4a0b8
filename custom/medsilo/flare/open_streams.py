"""Bound what NVFlare keeps of one sender's streams.

NVFlare 2.9 keeps a finished stream for as long as its sender wishes, up to an hour, with a thread; one that is never
finished for good, if its first piece is missing; and pieces that came out of their order in memory, however large.
"""

import threading

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError

MOST_STREAMS = 32  # of one sender that are not finished; an honest one sends a piece at a time, and again what was cut
MOST_KEPT = 256  # finished ones, kept for a minute for pieces that come twice


class Streams:
    """The streams that come in, by sender."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.lock = cell, threading.Lock()
        self.known: dict[str, dict[tuple, RxTask]] = {}  # the oldest first

    def take(self, message: Message, sender: str, most: int) -> bool:
        """Return whether a message of a stream is taken; of too many streams of one sender, the oldest end.

        most: bytes of one sender that may wait to be read.
        """
        for wish in (StreamHeaderKey.RETRY_TIMEOUT, StreamHeaderKey.RETRY_WAIT):
            message.headers.pop(wish, None)  # so a finished stream is kept for as long as our own configuration says
        if message.get_header(StreamHeaderKey.ERROR_MSG):  # begins none
            return True
        key = message.get_header(MessageHeaderKey.ORIGIN), message.get_header(StreamHeaderKey.STREAM_ID)
        with self.lock:
            known = self.known.get(sender, {})
            own = {key: task for key, task in known.items() if RxTask.rx_task_map.get(key) is task}
            if key not in own:
                own[key] = RxTask.find_or_create_task(message, self.cell.core_cell)
            self.known[sender] = own
            ended = [task for task in own.values() if _has_ended(task)]
            begun = [task for task in own.values() if not _has_ended(task)]
            waiting = sum(map(_waiting, own.values())) + len(message.payload or b"")
        for task in ended[:-MOST_KEPT]:
            task._remove_task()
        for task in begun[:-MOST_STREAMS]:
            task.stop(StreamError(f"{MOST_STREAMS} newer streams of this sender are open"))
        if waiting > most:
            own[key].stop(StreamError(f"more than {most} bytes of this sender wait to be read"))
        return waiting <= most


def _has_ended(task: RxTask) -> bool:
    return task.completed or task.failed


def _waiting(task: RxTask) -> int:
    """Return the bytes of a stream that have come and were not read."""
    return sum(len(piece or b"") for _, piece in [*task.chunks, *task.out_seq_chunks.values()])
