"""Limit the messages that a job's process accepts to the size that the plan needs.

NVFlare 2.9 accepts messages of any size. This module checks a message's announced size before NVFlare allocates memory
for the message. At the server, answer_gate.py not only limits the sites' messages, but also reads the sites' answers.
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

# Maximum number of answers of one sender that are unfinished at the same time. The limit is above 1, because an honest
# sender may repeat a broken answer.
MOST_OPEN = 8


class MessageLimits(Protocol):
    @property
    def size(self) -> int:
        """The maximum number of bytes in a message of a job."""

    @property
    def values(self) -> int:
        """The maximum number of values in a message of a job. A list or a map counts as a value, too."""


class Gate:
    """Limits the messages that a job's process at a site accepts. The subclass AnswerGate is for the server."""

    def __init__(self, cell: Cell, most: MessageLimits) -> None:
        self.cell, self.most = cell, most
        self.replies, self.streams = patches.Replies(cell), patches.StreamLimits(cell)
        # for each sender, the bytes of the tensors that were fetched for the sender's present message
        self.taken: dict[str, int] = {}
        self.refused: dict[str, str] = {}  # for each sender, the reason why a tensor was not fetched
        self.lock = threading.Lock()
        patches.hold_less(cell)
        patches.connect_in_time()

    def allow(self, most: MessageLimits) -> None:
        self.most = most
        patches.limit_blobs(self.cell, most.size, self.replies.handler, *self._readers)

    @property
    def _readers(self) -> list[BlobHandler]:
        """The message handlers of this gate, which read messages before NVFlare does."""
        return []

    def watch_fetching(self) -> None:
        self.replies.announced(f"{OBJ_DOWNLOADER_CHANNEL}:{OBJ_DOWNLOADER_TOPIC}", self._fetched)
        self.allow(self.most)

    def _fetched(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        """Accept an announced piece of a tensor, unless the message with the tensor would become too large."""
        if not self.replies.is_awaited(stream):  # this process has sent a newer request for the same piece
            return self.replies.refuse(stream, "nobody waits for it any more")
        origin, size = "".join(self._of_job(str(stream.get_headers().get(MessageHeaderKey.ORIGIN)))), stream.get_size()
        known = isinstance(size, int) and size > 0
        if size == 0:  # the reply answers a ping, or the other process does not have the tensors
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
        """Return two texts from the name of a cell: the name of the cell's owner, and a dot with the job's ID.

        If the cell does not belong to this job, the second text is empty. A site may have several cells in a job: for
        example, a training script in a separate process has its own cell.
        """
        return origin.partition("." + self.cell.get_fqcn().rpartition(".")[2])[:2]

    def _give_back(self, future: StreamFuture, origin: str, size: int) -> None:
        """Stop counting the bytes of a piece that did not arrive, because the piece will be fetched again."""
        with self.lock:
            if future.error and origin in self.taken:
                self.taken[origin] -= size

    def _streamed(self, message: Message, sender: str) -> Message | None:
        """Accept a message that is part of a stream, unless too many bytes of the same sender wait to be read. Return
        the reply that rejects the message, or None if the message is accepted.
        """
        taken = self.streams.take(message, sender, MOST_OPEN * self.most.size)
        return None if taken else make_reply(CellCode.MSG_TOO_BIG)

    def _too_large(self, size: int, more: str = "") -> str:
        """Return the reason why a message is rejected as too large. `more` is " or more" if the size of a further part
        of the message is unknown.
        """
        most = size_text(self.most.size)
        return f"its message of {size_text(size)}{more} was not taken: at most {most} belong to one"

    # ------------------------------------------------------------------ at a site
    def guard_site(self) -> None:
        self.replies.announced(f"{CellChannel.SERVER_COMMAND}:{ServerCommandNames.GET_TASK}", self._task_comes)
        patches.look_at_messages(self.cell, self._stream_comes)
        self.watch_fetching()

    def _stream_comes(self, message: Message) -> Message | None:
        """Inspect a message before NVFlare decodes the message. If the result is not None, the result is sent as a
        reply.
        """
        # this process only forwards messages to other cells
        is_own = message.get_header(MessageHeaderKey.DESTINATION) == self.cell.get_fqcn()
        return self._streamed(message, "") if is_own and patches.is_piece(message) else None

    def _task_comes(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        with self.lock:
            self.taken.clear()
        return self.replies.take(future, stream, resume)
