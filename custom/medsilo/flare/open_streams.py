"""Bound what NVFlare takes and keeps of one sender's streams.

NVFlare 2.9 keeps a finished stream for as long as its sender wishes, up to an hour, with a thread; one that is never
finished for good, if its first piece is missing; and pieces that came out of their order in memory, however large.
"""

import threading
from time import monotonic

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError

from medsilo.flare.leftovers import LEFTOVERS

MOST_STREAMS = 32  # of one sender that are not finished; an honest one sends a piece at a time, and again what was cut
MOST_KEPT = 256  # finished ones, kept for a while for pieces that come twice
LOOK = 1.0  # seconds between two looks at what was kept for long enough
NO_THREAD = threading.Timer(0.0, lambda: None)  # never started; NVFlare starts one for a stream that has none


def limit_blobs(cell: Cell, most: int, *others: BlobHandler) -> None:
    """Let a cell refuse every message of more bytes when it is announced. others: handlers that it does not know"""
    registered = (callback.cb for callback in [*cell.byte_receiver.registry.reg.values()])
    for handler in (*others, *(getattr(own, "__self__", None) for own in registered)):
        if isinstance(handler, BlobHandler):
            handler.max_blob_size = most


def is_piece(message: Message) -> bool:
    """Return whether a message is a piece of a stream."""
    where = message.get_header(MessageHeaderKey.CHANNEL), message.get_header(MessageHeaderKey.TOPIC)
    return where == (STREAM_CHANNEL, STREAM_DATA_TOPIC)


class Streams:
    """The streams that come in, by sender."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.lock = cell, threading.Lock()
        self.known: dict[str, dict[tuple, RxTask]] = {}  # the oldest first
        self.waiting: dict[str, int] = {}  # bytes of a sender that wait to be read, at most
        self.ended: dict[tuple, float] = {}  # when a stream was seen to have ended
        self.looked = monotonic()

    def take(self, message: Message, sender: str, most: int) -> bool:
        """Return whether a message of a stream is taken; of too many streams of one sender, the oldest end.

        most: bytes of one sender that may wait to be read.
        """
        for wish in (StreamHeaderKey.RETRY_TIMEOUT, StreamHeaderKey.RETRY_WAIT):
            message.headers.pop(wish, None)  # so a finished stream is kept for as long as our own configuration says
        if message.get_header(StreamHeaderKey.ERROR_MSG):  # begins none
            return True
        key = message.get_header(MessageHeaderKey.ORIGIN), message.get_header(StreamHeaderKey.STREAM_ID)
        size = len(message.payload or b"")
        ended, begun = list[RxTask](), list[RxTask]()
        with self.lock:
            self._forget_old()
            own = self.known.setdefault(sender, {})
            is_new = key not in own or RxTask.rx_task_map.get(key) is not own[key]
            if is_new:
                own = self.known[sender] = _still_kept(own)
                own[key] = RxTask.find_or_create_task(message, self.cell.core_cell)
                _keep_without_thread(own[key])
                ended = [task for task in own.values() if _has_ended(task)]
                begun = [task for task in own.values() if not _has_ended(task)]
            waiting = self.waiting.get(sender, 0) + size
            if is_new or waiting > most:  # counted for each stream and not for each of its pieces
                waiting = sum(map(_waiting, own.values())) + size
            self.waiting[sender] = waiting
        if is_new:
            LEFTOVERS.sent()  # a stream is answered, or answers a request
        for task in ended[:-MOST_KEPT]:
            task._remove_task()
        for task in begun[:-MOST_STREAMS]:
            task.stop(StreamError(f"{MOST_STREAMS} newer streams of this sender are open"))
        if waiting > most:
            own[key].stop(StreamError(f"more than {most} bytes of this sender wait to be read"))
        return waiting <= most

    def _forget_old(self) -> None:
        """Let go of finished streams that were kept for as long as our own configuration says."""
        now = monotonic()
        if now - self.looked < LOOK:
            return
        self.looked = now
        self.known = {sender: _still_kept(own) for sender, own in self.known.items()}
        ended = {key: task for own in self.known.values() for key, task in own.items() if _has_ended(task)}
        self.ended = {key: self.ended.get(key, now) for key in ended}
        for key, task in ended.items():
            if now - self.ended[key] > _kept_for(task):
                task._remove_task()


def _still_kept(streams: dict[tuple, RxTask]) -> dict[tuple, RxTask]:
    return {key: task for key, task in streams.items() if RxTask.rx_task_map.get(key) is task}


def _has_ended(task: RxTask) -> bool:
    return task.completed or task.failed


def _keep_without_thread(task: RxTask) -> None:
    task.cleanup_timer = NO_THREAD


def _kept_for(task: RxTask) -> float:
    return task.completed_task_ttl


def _waiting(task: RxTask) -> int:
    """Return the bytes of a stream that have come and were not read."""
    return sum(len(piece or b"") for _, piece in [*task.chunks, *task.out_seq_chunks.values()])
