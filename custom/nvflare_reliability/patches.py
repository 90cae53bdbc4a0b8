"""NVFlare's inner parts, in the processes of a job: they are touched here, and in kit_patches.py those of all others.

Each part does what NVFlare gives no other way to. `upstream/NAME.md` is the issue about it for NVFlare's maintainers,
with a patch beside it where one is small. For each, a test shows NVFlare's own behaviour without it, and fails when it
is no longer needed (tests/federation/test_patches.py). Where NVFlare's code differs from what a part was made for, the
log says so when the part begins.
"""

import gc
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.download_service import (
    OBJ_DOWNLOADER_CHANNEL,
    OBJ_DOWNLOADER_TOPIC,
    DownloadStatus,
    ProduceRC,
    _PropKey,
)
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import Stream, StreamError, StreamFuture
from nvflare.fuel.utils.class_loader import get_class_name
from nvflare.fuel.utils.fobs import fobs

from nvflare_reliability.compatibility import made_for

if TYPE_CHECKING:
    from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

BUFFER = 1 << 18  # bytes of a message's buffer, in addition to its own; larger messages are sent in frames of this size
LONG, LONGEST_FRAME = 2 << 20, 8 << 20  # bytes of a message that only quick lines carry, and of its frames
MOST_LEFT = 64 << 20  # bytes that may be left behind
MOST_STREAMS = 32  # of one sender that are not finished; an honest one sends a dozen replies, and again what was cut
MOST_KEPT = 256  # finished ones, kept for a while for pieces that come twice
# In the state that a request or a reply has: the number of the next piece, how many there are, how many one reply has
NEXT, PIECES, TOGETHER = "next", "pieces", "together"
LOOK = 1.0  # seconds between two looks at what was kept for long enough
NO_THREAD = threading.Timer(0.0, lambda: None)  # never started; NVFlare starts one for a stream that has none
Send = Callable[..., Message]


# ---------------------------------------------------------------------------------------------------- memory
@made_for(
    "nvflare.fuel.f3.streaming.byte_streamer:TxTask.__init__",
    "nvflare.fuel.f3.streaming.byte_streamer:ByteStreamer.send",
)
def hold_less(cell: Cell) -> None:
    """Make the buffers of a cell smaller, and the frames of large messages larger: each frame costs the same work."""
    streamer, lock = cell.byte_streamer, threading.Lock()
    own = streamer.send

    def send(
        channel: str, topic: str, target: str, headers: dict, stream: Stream, *how: Any, **more: Any
    ) -> StreamFuture:
        size = stream.get_size()
        with lock:
            streamer.chunk_size = min(size, LONGEST_FRAME) if size > LONG else BUFFER
            return own(channel, topic, target, headers, stream, *how, **more)

    streamer.send = send


@made_for(
    "nvflare.fuel.f3.streaming.byte_streamer:TxTask.stop",
    "nvflare.fuel.f3.streaming.stream_types:StreamFuture._invoke_callbacks",
    begins="begin",
)
class GarbageBudget:
    """Bytes that are left behind in this process, about; they are freed in time."""

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
            much = self._bytes >= MOST_LEFT
            if much:
                self._bytes = 0
        if much:
            gc.collect()


GARBAGE = GarbageBudget()  # a process has one job


# ---------------------------------------------------------------------------------------------------- streams
@made_for(
    "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler.__init__",
    "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler.handle_blob_cb",
)
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


def end_stream(stream: Stream, reason: str) -> None:
    """End a stream that comes in, and tell its sender why."""
    stream.task.stop(StreamError(reason))


@made_for(
    "nvflare.fuel.f3.streaming.byte_receiver:RxTask.find_or_create_task",
    "nvflare.fuel.f3.streaming.byte_receiver:RxTask.stop",
    "nvflare.fuel.f3.streaming.byte_receiver:RxTask._remove_task",
)
class StreamLimits:
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
            GARBAGE.sent()  # a stream is answered, or answers a request
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
            if now - self.ended[key] > task.completed_task_ttl:
                task._remove_task()


def _still_kept(streams: dict[tuple, RxTask]) -> dict[tuple, RxTask]:
    return {key: task for key, task in streams.items() if RxTask.rx_task_map.get(key) is task}


def _has_ended(task: RxTask) -> bool:
    return task.completed or task.failed


def _keep_without_thread(task: RxTask) -> None:
    task.cleanup_timer = NO_THREAD


def _waiting(task: RxTask) -> int:
    """Return the bytes of a stream that have come and were not read."""
    return sum(len(piece or b"") for _, piece in [*task.chunks, *task.out_seq_chunks.values()])


# ---------------------------------------------------------------------------------------------------- messages
@made_for("nvflare.fuel.utils.fobs.fobs:register", "nvflare.fuel.utils.fobs.fobs:Packer.pack")
def send_tensors_by(decomposer: "type[ViaDownloaderDecomposer]") -> None:
    """Have all tensors or arrays of this process sent by a decomposer of ours, whatever it knew before."""
    own = decomposer()
    fobs._decomposers[get_class_name(own.supported_type())] = own
    fobs._dot_handlers.update(dict.fromkeys(own.supported_dots(), own))


@made_for(
    "nvflare.fuel.f3.cellnet.core_cell:CoreCell.set_message_interceptor",
    "nvflare.private.fed.server.server_command_agent:ServerCommandAgent._execute_command",
)
def look_at_messages(cell: Cell, look: Callable[[Message], Message | None]) -> None:
    """Have each message looked at before it is decoded; what `look` returns is sent back in its place."""
    cell.core_cell.set_message_interceptor(look)


@made_for("nvflare.fuel.f3.cellnet.cell:Adapter.call")
class AnswerReader:
    """Gives sites' answers to a function of ours to be read, in the place of NVFlare's cell."""

    def __init__(self, cell: Cell, answered: Callable[[StreamFuture, Stream], None]) -> None:
        found = cell.byte_receiver.registry.find(CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE)
        self._take = found.cb.__self__.blob_cb
        self.handler = BlobHandler(answered)
        cell.register_stream_cb(CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE, self._comes)

    def _comes(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        return self.handler.handle_blob_cb(future, stream, resume, stream)

    def pass_on(self, headers: dict, answer: Shareable) -> None:
        """Give NVFlare an answer that was read."""
        self._take(_Read(headers, answer))


class _Unspoken(Shareable):
    """An answer that is not spelt out: NVFlare makes a line of debugging of it, tensors and all, whether or not it is
    logged. For 29 M parameters that took 0.3 s."""

    def __repr__(self) -> str:
        return f"<{len(self)} items>"


class _Read:
    """A message that was read already, in the form in which NVFlare takes one that it has to read."""

    def __init__(self, headers: dict, payload: Shareable) -> None:
        self.headers = {key: value for key, value in headers.items() if key != StreamHeaderKey.PAYLOAD_ENCODING}
        self.payload = _Unspoken()
        self.payload.update(payload)

    def result(self) -> Shareable:
        return self.payload


@made_for("nvflare.fuel.f3.cellnet.cell:Cell._process_reply", "nvflare.fuel.f3.cellnet.cell:Cell._send_one_request")
class Replies:
    """Answers to a cell's requests: announced to a function of ours, taken as NVFlare takes it, or refused."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.handler = cell, BlobHandler(cell._process_reply)

    def announced(self, topic: str, comes: Callable[[StreamFuture, Stream, bool], int]) -> None:
        """Have replies on a topic announced."""
        self.cell.register_stream_cb(CellChannel.RETURN_ONLY, topic, comes)

    def take(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        """Take a reply."""
        return self.handler.handle_blob_cb(future, stream, resume)

    def is_awaited(self, stream: Stream) -> bool:
        """Return whether somebody still waits for a reply that is announced."""
        return stream.get_headers().get(StreamHeaderKey.STREAM_REQ_ID) in self.cell.requests_dict

    def refuse(self, stream: Stream, reason: str) -> int:
        """Let the request fail at once that a stream answers."""
        self.settle(stream, make_reply(ReturnCode.MSG_TOO_BIG, error=reason))
        end_stream(stream, reason)
        return 0

    def settle(self, stream: Stream, reply: Message) -> int:
        """Let a request have another reply than the stream that answers it."""
        waiter = self.cell.requests_dict.get(stream.get_headers().get(StreamHeaderKey.STREAM_REQ_ID))
        if waiter:
            waiter.stream_error = "it is not read"
            waiter.result = reply
            waiter.in_receiving.set()
        return 0


@made_for("nvflare.fuel.f3.streaming.download_service:_download_object")
def send_requests_by(cell: Cell, request: Send) -> Send:
    """Have a cell's requests sent by a function of ours; returns NVFlare's own."""
    own: Send = cell.send_request
    cell.send_request = request
    return own


@made_for("nvflare.fuel.f3.cellnet.cell:Adapter._send_response")
def reply_once(cell: Cell, to: str) -> None:
    """Send a cell's replies to requests once. to: the requests' channel and topic"""
    own = cell.send_blob

    def send(channel: str, topic: str, *given: Any, **asked: Any) -> StreamFuture:
        if (channel, topic) == (CellChannel.RETURN_ONLY, to):
            asked["reliable"] = False
        return own(channel, topic, *given, **asked)

    cell.send_blob = send


@made_for("nvflare.fuel.f3.cellnet.cell:Cell._send_one_request", "nvflare.fuel.f3.streaming.byte_receiver:RxTask.stop")
def end_reply(request: Message) -> None:
    """End what has begun to come in reply to a request that nobody waits for any more."""
    own = request.get_header(StreamHeaderKey.STREAM_REQ_ID)
    with RxTask.map_lock:
        tasks = [task for task in RxTask.rx_task_map.values() if _request_of(task) == own]
    for task in tasks:
        task.stop(StreamError("it is asked for again"))


def received(cell: Cell, request: Message) -> int:
    """Return the bytes that have come so far in reply to a request."""
    waiter = cell.requests_dict.get(request.get_header(StreamHeaderKey.STREAM_REQ_ID))
    return waiter.receiving_future.get_progress() if waiter and waiter.receiving_future else 0


def _request_of(task: RxTask) -> str | None:
    return (task.headers or {}).get(StreamHeaderKey.STREAM_REQ_ID)


def ping() -> Message:
    """Return a request that who has tensors answers with a few bytes, whatever it has."""
    return new_cell_message({}, {_PropKey.REF_ID: "ping", _PropKey.CANCEL: True})


@made_for("nvflare.fuel.f3.streaming.download_service:_download_object")
class AskedPiece:
    """A piece of tensors that a request asks for, by its number."""

    def __init__(self, request: Message) -> None:
        self.asked: dict[str, Any] = request.payload
        self.tensors: str = self.asked[_PropKey.REF_ID]
        self.number, _ = asked_for(self.asked.get(_PropKey.STATE))

    def other(self, number: int, together: int) -> Message:
        """Return the request for other pieces of the same tensors, from this number on."""
        return new_cell_message({}, {**self.asked, _PropKey.STATE: {NEXT: number, TOGETHER: together}})

    def confirm(self, cell: Cell, end: Message, source: str) -> None:
        """Confirm that all have come, where the word that there are no more asks for it, as NVFlare does."""
        told = end.payload if isinstance(end.payload, dict) else {}
        if told.get(_PropKey.CONFIRM_EXPECTED):
            all_came = {
                _PropKey.CONFIRM: DownloadStatus.SUCCESS,
                _PropKey.CONFIRM_NONCE: told.get(_PropKey.CONFIRM_NONCE),
            }
            message = new_cell_message({}, {_PropKey.REF_ID: self.tensors, **all_came})
            cell.fire_and_forget(OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, source, message, optional=True)


def has_stopped(cell: Cell) -> bool:
    """Return whether a cell sends nothing any more."""
    return cell.core_cell.asked_to_stop


def no_more() -> Message:
    """Return the word that there are no more pieces."""
    return make_reply(ReturnCode.OK, body={_PropKey.STATUS: ProduceRC.EOF})


def asked_for(state: dict[str, int] | None) -> tuple[int, int]:
    """Return the number of the piece that is asked for with the state of the one before, and how many from there on."""
    given = state or {}
    return given.get(NEXT, 0), given.get(TOGETHER, 1)


def pieces_in(reply: Message) -> int:
    """Return how many pieces there are, as a reply with one of them says; 0 where it says nothing."""
    match reply.payload:
        case {_PropKey.STATE: {"pieces": int(pieces)}}:
            return pieces
    return 0


# ---------------------------------------------------------------------------------------------------- the server
class _EachOnce(list):
    """A list that holds each thing once."""

    def append(self, item: object) -> None:
        if not any(item is known for known in self):
            super().append(item)


@made_for("nvflare.apis.impl.wf_comm_server:WFCommServer.process_task_request")
def deliver_once(task: Task) -> None:
    """Let a task's list of deliveries hold each once."""
    task.client_tasks = _EachOnce()


@made_for("nvflare.private.fed.app.simulator.simulator_runner:SimulatorRunner.start_server_app")
def cell_of_job(fl_ctx: FLContext) -> Cell:
    """Return the cell where sites' answers come in, in a simulation, too."""
    return fl_ctx.get_engine().server.command_agent.cell
