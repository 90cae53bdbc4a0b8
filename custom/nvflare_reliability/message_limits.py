"""Limit what NVFlare's cell lets in while a study runs: no message may be larger than the plan's own layout needs.

NVFlare 2.9 takes whatever size is announced. So sizes are looked at when they are announced, before anything is held.
The server's gate (answer_gate.py) reads sites' answers, too.
"""

import threading
from typing import Protocol

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC
from nvflare.fuel.f3.streaming.stream_types import Stream, StreamFuture

from nvflare_reliability import patches
from nvflare_reliability.errors import size_text

MOST_OPEN = 8  # answers of one sender that may be open at the same time; an honest one sends again what was cut


class MessageLimits(Protocol):
    """The most that one message may have."""

    @property
    def size(self) -> int:
        """Return the bytes."""

    @property
    def values(self) -> int:
        """Return the values, of lists and mappings too."""


class Gate:
    """Bounds what comes in through a cell of a job; a site's, or with more around it the server's."""

    def __init__(self, cell: Cell, most: MessageLimits) -> None:
        """most: for every message until more is allowed."""
        self.cell, self.most = cell, most
        self.replies, self.streams = patches.Replies(cell), patches.StreamLimits(cell)
        self.taken: dict[str, int] = {}  # bytes fetched for the message that is being read, by sender
        self.refused: dict[str, str] = {}  # why fetching was ended, by sender
        self.lock = threading.Lock()
        patches.hold_less(cell)

    def allow(self, most: MessageLimits) -> None:
        """Bound every message from now on."""
        self.most = most
        patches.limit_blobs(self.cell, most.size, self.replies.handler, *self._readers)

    @property
    def _readers(self) -> list[BlobHandler]:
        """The handlers of messages that are read here and not by NVFlare."""
        return []

    def watch_fetching(self) -> None:
        """Count the bytes of tensors before they are fetched."""
        self.replies.announced(f"{OBJ_DOWNLOADER_CHANNEL}:{OBJ_DOWNLOADER_TOPIC}", self._fetched)
        self.allow(self.most)

    def _fetched(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        """Take a piece that a sender announces, unless it is more than belongs to one message."""
        if not self.replies.is_awaited(stream):  # it was asked for again
            return self.replies.refuse(stream, "nobody waits for it any more")
        origin, size = "".join(self._of_job(str(stream.get_headers().get(MessageHeaderKey.ORIGIN)))), stream.get_size()
        known = isinstance(size, int) and size > 0
        if size == 0:  # a ping's, or that of a process that has no such tensors
            return self.replies.settle(stream, make_reply(stream.get_headers().get(MessageHeaderKey.RETURN_CODE)))
        with self.lock:
            total = self.taken.get(origin, 0) + (size if known else 0)
            fits = known and total <= self.most.size
            if fits:
                self.taken[origin] = total
            else:
                self.refused[origin] = self._too_large(total, " or more")
        if fits:
            future.add_done_callback(self._give_back, future, origin, size)
            return self.replies.take(future, stream, resume)
        return self.replies.refuse(stream, self.refused[origin])

    def _of_job(self, origin: str) -> tuple[str, str]:
        """Return whose a cell is, and the end of the name of that one's cell of this job; "" if it is not of the job.

        A site may have more cells for a job, as for a training script in a process of its own.
        """
        return origin.partition("." + self.cell.get_fqcn().rpartition(".")[2])[:2]

    def _give_back(self, future: StreamFuture, origin: str, size: int) -> None:
        """Forget a piece that did not arrive; it is fetched again."""
        with self.lock:
            if future.error and origin in self.taken:
                self.taken[origin] -= size

    def _streamed(self, message: Message, sender: str) -> Message | None:
        """Take a message of a stream, unless too much of its sender waits to be read."""
        taken = self.streams.take(message, sender, MOST_OPEN * self.most.size)
        return None if taken else make_reply(CellCode.MSG_TOO_BIG)

    def _too_large(self, size: int, more: str = "") -> str:
        """Return why a message is not taken. more: said behind a size that is the part announced so far."""
        most = size_text(self.most.size)
        return f"its message of {size_text(size)}{more} was not taken: at most {most} belong to one"

    # ------------------------------------------------------------------ at a site
    def guard_site(self) -> None:
        """Bound what the server sends."""
        self.replies.announced(f"{CellChannel.SERVER_COMMAND}:{ServerCommandNames.GET_TASK}", self._task_comes)
        patches.look_at_messages(self.cell, self._stream_comes)
        self.watch_fetching()

    def _stream_comes(self, message: Message) -> Message | None:
        """Look at a message before it is decoded; what is returned is sent back in its place."""
        is_own = message.get_header(MessageHeaderKey.DESTINATION) == self.cell.get_fqcn()  # else it is passed on
        return self._streamed(message, "") if is_own and patches.is_piece(message) else None

    def _task_comes(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        with self.lock:
            self.taken.clear()
        return self.replies.take(future, stream, resume)
