"""Limit the size of messages to a job's process: no message may be larger than the plan needs.

NVFlare 2.9 accepts messages of any size. medsilo checks the announced size before memory is used. On the server,
answer_gate.py also reads sites' answers.
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

MOST_OPEN = 8  # maximum number of unfinished answers from one sender; an honest sender may repeat broken answers


class MessageLimits(Protocol):
    """Limits of one message."""

    @property
    def size(self) -> int:
        """The maximum number of bytes."""

    @property
    def values(self) -> int:
        """The maximum number of values, including lists and maps."""


class Gate:
    """Limits the messages to the process of a job at a site. AnswerGate extends it for the server."""

    def __init__(self, cell: Cell, most: MessageLimits) -> None:
        """Create a gate for a job's process.

        Args:
            cell: The process's cell.
            most: The limits of each message, until `allow` changes them.
        """
        self.cell, self.most = cell, most
        self.replies, self.streams = patches.Replies(cell), patches.StreamLimits(cell)
        self.taken: dict[str, int] = {}  # for each sender, the bytes fetched for the message that is being read
        self.refused: dict[str, str] = {}  # for each sender, the reason why fetching was stopped
        self.lock = threading.Lock()
        patches.hold_less(cell)
        patches.connect_in_time()

    def allow(self, most: MessageLimits) -> None:
        """Change the limits of all later messages."""
        self.most = most
        patches.limit_blobs(self.cell, most.size, self.replies.handler, *self._readers)

    @property
    def _readers(self) -> list[BlobHandler]:
        """The handlers of messages that this gate reads before NVFlare does."""
        return []

    def watch_fetching(self) -> None:
        """Count the bytes of tensors before they are fetched."""
        self.replies.announced(f"{OBJ_DOWNLOADER_CHANNEL}:{OBJ_DOWNLOADER_TOPIC}", self._fetched)
        self.allow(self.most)

    def _fetched(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        """Accept an announced piece of a tensor, unless its message would become too large."""
        if not self.replies.is_awaited(stream):  # The piece was requested again in the meantime.
            return self.replies.refuse(stream, "nobody waits for it any more")
        origin, size = "".join(self._of_job(str(stream.get_headers().get(MessageHeaderKey.ORIGIN)))), stream.get_size()
        known = isinstance(size, int) and size > 0
        if size == 0:  # The reply answers a ping, or the process does not have the tensors.
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
        """Split a cell's name into its owner and its suffix in this job. The suffix is empty if the cell does not
        belong to the job.

        A site may have several cells in a job, for example for a training script in a separate process.
        """
        return origin.partition("." + self.cell.get_fqcn().rpartition(".")[2])[:2]

    def _give_back(self, future: StreamFuture, origin: str, size: int) -> None:
        """Subtract the bytes of a piece that did not arrive, because it is fetched again."""
        with self.lock:
            if future.error and origin in self.taken:
                self.taken[origin] -= size

    def _streamed(self, message: Message, sender: str) -> Message | None:
        """Accept a part of a stream, unless too many bytes of its sender wait to be read."""
        taken = self.streams.take(message, sender, MOST_OPEN * self.most.size)
        return None if taken else make_reply(CellCode.MSG_TOO_BIG)

    def _too_large(self, size: int, more: str = "") -> str:
        """Return the reason for rejecting a message. `more` is " or more" if only a part of the size is known."""
        most = size_text(self.most.size)
        return f"its message of {size_text(size)}{more} was not taken: at most {most} belong to one"

    # ------------------------------------------------------------------ at a site
    def guard_site(self) -> None:
        """Limit the messages from the server."""
        self.replies.announced(f"{CellChannel.SERVER_COMMAND}:{ServerCommandNames.GET_TASK}", self._task_comes)
        patches.look_at_messages(self.cell, self._stream_comes)
        self.watch_fetching()

    def _stream_comes(self, message: Message) -> Message | None:
        """Inspect a message before NVFlare decodes it; a message that this method returns is sent as the reply."""
        # Messages to other cells are only forwarded.
        is_own = message.get_header(MessageHeaderKey.DESTINATION) == self.cell.get_fqcn()
        return self._streamed(message, "") if is_own and patches.is_piece(message) else None

    def _task_comes(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        with self.lock:
            self.taken.clear()
        return self.replies.take(future, stream, resume)
