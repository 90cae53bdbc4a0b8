"""Patch NVFlare in the processes of a job. The file kit_patches.py contains the patches for all processes that are not
processes of a job.

Each patch adds a behaviour for which NVFlare has no public interface. For a patch NAME, the file `upstream/NAME.md`
describes the problem for NVFlare's maintainers.

For each patch, a test in tests/federation/test_patches.py shows NVFlare's behaviour without the patch. A patch's test
fails when the patch is no longer needed. A patch logs a warning if NVFlare's code differs from the tested versions.
"""

import errno
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from time import monotonic
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.cell import Cell, SimpleWaiter
from nvflare.fuel.f3.cellnet.core_cell import CellAgent
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.net_utils import get_ssl_context
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm import conn_manager
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler, BlobStream
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.download_service import (
    OBJ_DOWNLOADER_CHANNEL,
    OBJ_DOWNLOADER_TOPIC,
    DownloadStatus,
    ProduceRC,
    _PropKey,
)
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import Stream, StreamError, StreamFuture, StreamTaskSpec
from nvflare.fuel.sec import audit
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.utils.class_loader import get_class_name
from nvflare.fuel.utils.fobs import fobs

from nvflare_reliability.compatibility import is_merged, made_for

if TYPE_CHECKING:
    from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

# bytes in the buffer of a stream; a message that is larger than the buffer is sent in frames of the buffer's size
BUFFER = 1 << 18
# A message with more than LONG bytes is sent in frames of up to LONGEST_FRAME bytes. A frame of 4 MiB and its header
# would exceed the limit of NVFlare's HTTP driver.
LONG, LONGEST_FRAME = 2 << 20, (4 << 20) - (1 << 16)
MOST_LEFT = 64 << 20  # number of bytes of garbage that causes a run of the garbage collector
# Maximum number of unfinished streams of one sender. An honest sender has about a dozen unfinished replies, and may
# repeat broken streams.
MOST_STREAMS = 32
# maximum number of finished streams that are remembered, so that repeated messages of these streams are recognised
MOST_KEPT = 256
# keys in the state of a request or a reply: index of the next piece, total number of pieces, number of pieces in one
# reply
NEXT, PIECES, TOGETHER = "next", "pieces", "together"
LOOK = 1.0  # seconds between two checks for old streams
HANDSHAKE = 10.0
# maximum seconds between two connection attempts; the pause is short, so that a restarted server is found quickly
AGAIN = 4
# seconds without data before a TCP keep-alive probe, seconds between two probes, and number of probes
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 30, socket.TCP_KEEPCNT: 8}
# A timer that is never started. NVFlare starts a timer thread for each stream, unless the stream already has a timer.
NO_THREAD = threading.Timer(0.0, lambda: None)
Send = Callable[..., Message]
LOG = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------- memory
def fits_buffers() -> bool:
    """Return True if the installed NVFlare uses a small buffer for a short message."""
    task = TxTask(SimpleNamespace(), BUFFER, "", "", "", {}, BlobStream(bytes(10), {}), False, False, False)
    return len(task.buffer) == 10


@made_for(
    "nvflare.fuel.f3.streaming.byte_streamer:TxTask.__init__",
    "nvflare.fuel.f3.streaming.byte_streamer:ByteStreamer.send",
    merged=fits_buffers,
    whole=False,
)
def hold_less(cell: Cell) -> None:
    """Make a cell use smaller buffers for short messages, and larger frames for large messages, because each frame
    takes time.
    """
    streamer, lock = cell.byte_streamer, threading.Lock()
    own, usual = streamer.send, streamer.chunk_size if is_merged("hold_less") else BUFFER

    def send(
        channel: str, topic: str, target: str, headers: dict, stream: Stream, *how: Any, **more: Any
    ) -> StreamFuture:
        size = stream.get_size()
        with lock:
            streamer.chunk_size = min(size, LONGEST_FRAME) if size > LONG else usual
            return own(channel, topic, target, headers, stream, *how, **more)

    streamer.send = send


def frees_sent() -> bool:
    """Return True if the installed NVFlare frees a sent message without the garbage collector."""
    future = StreamFuture(0, task_handle=StreamTaskSpec())
    future.set_result(0)
    return future.task_handle is None


@made_for(
    "nvflare.fuel.f3.streaming.byte_streamer:TxTask.stop",
    "nvflare.fuel.f3.streaming.stream_types:StreamFuture._invoke_callbacks",
    begins="begin",
    merged=frees_sent,
    whole=False,
)
class GarbageBudget:
    """Estimates the bytes of garbage in this process, and runs the garbage collector if there are too many bytes of
    garbage.
    """

    def __init__(self) -> None:
        self._bytes, self._lock = 0, threading.Lock()

    def begin(self) -> None:
        """Exclude all existing objects from garbage collection, so that the garbage collector only examines new
        objects.
        """
        gc.collect()
        gc.freeze()

    def sent(self, size: int = 0) -> None:
        """Count the bytes of a sent message as garbage. If there are too many bytes of garbage, run the garbage
        collector.
        """
        if is_merged("GarbageBudget"):
            return
        with self._lock:
            self._bytes += BUFFER + size
            much = self._bytes >= MOST_LEFT
            if much:
                self._bytes = 0
        if much:
            gc.collect()


GARBAGE = GarbageBudget()  # a process needs only one object of this class, because each process runs only one job


# ---------------------------------------------------------------------------------------------------- streams
@made_for(
    "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler.__init__",
    "nvflare.fuel.f3.streaming.blob_streamer:BlobHandler.handle_blob_cb",
    merged=lambda: hasattr(Cell, "set_max_blob_size"),
    whole=False,
)
def limit_blobs(cell: Cell, most: int, *others: BlobHandler) -> None:
    """Make a cell reject each message whose announced size exceeds `most` bytes.

    Args:
        *others: Further message handlers, which are not registered at the cell.
    """
    registered = [callback.cb for callback in [*cell.byte_receiver.registry.reg.values()]]
    if is_merged("limit_blobs"):
        cell.set_max_blob_size(most)
        registered = []
    for handler in (*others, *(getattr(own, "__self__", None) for own in registered)):
        if isinstance(handler, BlobHandler):
            handler.max_blob_size = most


def is_piece(message: Message) -> bool:
    where = message.get_header(MessageHeaderKey.CHANNEL), message.get_header(MessageHeaderKey.TOPIC)
    return where == (STREAM_CHANNEL, STREAM_DATA_TOPIC)


def end_stream(stream: Stream, reason: str) -> None:
    stream.task.stop(StreamError(reason))


@made_for(
    "nvflare.fuel.f3.streaming.byte_receiver:RxTask.find_or_create_task",
    "nvflare.fuel.f3.streaming.byte_receiver:RxTask.stop",
    "nvflare.fuel.f3.streaming.byte_receiver:RxTask._remove_task",
)
class StreamLimits:
    """Limits the number of each sender's incoming streams, and the bytes that have arrived in these streams but have
    not been read.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell, self.lock = cell, threading.Lock()
        self.known: dict[str, dict[tuple, RxTask]] = {}
        self.waiting: dict[str, int] = {}  # an upper bound, for each sender, on the bytes that wait to be read
        # for each finished stream, the time at which a check first found the stream finished
        self.ended: dict[tuple, float] = {}
        self.looked = monotonic()

    def take(self, message: Message, sender: str, most: int) -> bool:
        """Return True if the process accepts a message that belongs to a stream.

        If the sender has too many unfinished streams, the oldest of these streams are ended.

        Args:
            most: The maximum number of bytes from this sender that may wait to be read.
        """
        for wish in (StreamHeaderKey.RETRY_TIMEOUT, StreamHeaderKey.RETRY_WAIT):
            # a sender must not decide how long a finished stream is remembered
            message.headers.pop(wish, None)
        if message.get_header(StreamHeaderKey.ERROR_MSG):  # a message that reports an error does not start a stream
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
            # the waiting bytes are counted exactly only for a new stream, or if the estimate exceeds the limit
            if is_new or waiting > most:
                waiting = sum(map(_waiting, own.values())) + size
            self.waiting[sender] = waiting
        if is_new:
            # each stream is a reply, or a request that causes a reply, so every stream leaves garbage in memory
            GARBAGE.sent()
        for task in ended[:-MOST_KEPT]:
            task._remove_task()
        for task in begun[:-MOST_STREAMS]:
            task.stop(StreamError(f"{MOST_STREAMS} newer streams of this sender are open"))
        if waiting > most:
            own[key].stop(StreamError(f"more than {most} bytes of this sender wait to be read"))
        return waiting <= most

    def _forget_old(self) -> None:
        """Forget each finished stream after the time that NVFlare's configuration sets."""
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
    """Return the number of bytes of a stream that have arrived but have not been read."""
    return sum(len(piece or b"") for _, piece in [*task.chunks, *task.out_seq_chunks.values()])


# ---------------------------------------------------------------------------------------------------- connections
@made_for(
    "nvflare.fuel.f3.drivers.tcp_driver:TcpDriver.connect",
    "nvflare.fuel.f3.drivers.tcp_driver:TcpDriver.shutdown",
    "nvflare.fuel.f3.drivers.socket_conn:SocketConnection.__init__",
    "nvflare.fuel.f3.sfm.conn_manager:ConnManager.start_connector_task",
)
def connect_in_time() -> None:
    """End a connection attempt if the TLS handshake takes too long or the connector is stopped.

    With this patch, NVFlare connects again after a slow handshake; without it, NVFlare would wait forever. The patch
    also shortens the pause between two connection attempts from ten seconds to four.
    """
    if TcpDriver.connect is not _connect:
        conn_manager.MAX_WAIT = conn_manager.SILENT_RECONNECT_TIME = AGAIN
        TcpDriver.shutdown = _shutting_down_too(TcpDriver.shutdown)
        TcpDriver.connect = _connect


def _connect(driver: TcpDriver, connector: ConnectorInfo) -> None:
    driver.connector = connector
    host, port = connector.params[DriverParams.HOST.value], int(connector.params[DriverParams.PORT.value])
    context = get_ssl_context(connector.params, ssl_server=False)
    line = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    line = context.wrap_socket(line) if context else line
    try:
        keep_alive(line)
        line.settimeout(HANDSHAKE)
        driver.being_made = line
        line.connect((host, port))
        line.settimeout(None)
        connection = SocketConnection(line, connector, bool(context))
    except BaseException:
        line.close()
        raise
    driver.add_connection(connection)
    # if the connector was stopped during the handshake, NVFlare does not know the connection yet and would leave it
    # open
    if connector.stopped.is_set():
        connection.close()
    connection.read_loop()
    driver.close_connection(connection)


def _shutting_down_too(own: Callable[[TcpDriver], None]) -> Callable[[TcpDriver], None]:
    def shutdown(driver: TcpDriver) -> None:
        own(driver)
        if line := getattr(driver, "being_made", None):
            end_socket(line)

    return shutdown


def keep_alive(line: socket.socket) -> None:
    """Make the operating system close a connection some minutes after the other party's machine has disappeared."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)


def end_socket(line: socket.socket) -> None:
    """Shut down a connection. As a result, a thread that waits for data on the closed connection gets an error."""
    with suppress(OSError, ValueError):  # the connection may have ended before this call
        line.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------------------------------------------- messages
@made_for("nvflare.fuel.utils.fobs.fobs:register", "nvflare.fuel.utils.fobs.fobs:Packer.pack")
def send_tensors_by(decomposer: "type[ViaDownloaderDecomposer]") -> None:
    """Replace the NVFlare decomposer that sends all tensors or arrays of this process."""
    own = decomposer()
    fobs._decomposers[get_class_name(own.supported_type())] = own
    fobs._dot_handlers.update(dict.fromkeys(own.supported_dots(), own))


@made_for(
    "nvflare.fuel.f3.cellnet.core_cell:CoreCell.set_message_interceptor",
    "nvflare.private.fed.server.server_command_agent:ServerCommandAgent._execute_command",
)
def look_at_messages(cell: Cell, look: Callable[[Message], Message | None]) -> None:
    """Inspect each message to a cell before NVFlare decodes the message.

    Args:
        look: A function that is called with each message. If its result is not None, the result is sent as the reply.
    """
    cell.core_cell.set_message_interceptor(look)


@made_for("nvflare.fuel.f3.cellnet.cell:Adapter.call")
class AnswerReader:
    """Passes each site's answer to a function that reads the answer, instead of passing the answer directly to
    NVFlare's cell.
    """

    def __init__(self, cell: Cell, answered: Callable[[StreamFuture, Stream], None]) -> None:
        found = cell.byte_receiver.registry.find(CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE)
        self._take = found.cb.__self__.blob_cb
        self.handler = BlobHandler(answered)
        cell.register_stream_cb(CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE, self._comes)

    def _comes(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        return self.handler.handle_blob_cb(future, stream, resume, stream)

    def pass_on(self, headers: dict, answer: Shareable) -> None:
        self._take(_Read(headers, answer))


class _Unspoken(Shareable):
    """An answer whose conversion to text is fast.

    NVFlare converts each answer and its tensors to text for a debug log, even if this log is off. For an answer with 29
    million parameters, the conversion to text takes 0.3 s.
    """

    def __repr__(self) -> str:
        return f"<{len(self)} items>"


class _Read:
    """Wraps a message that this process has already read, so that NVFlare can handle the message as if it were still
    unread.
    """

    def __init__(self, headers: dict, payload: Shareable) -> None:
        self.headers = {key: value for key, value in headers.items() if key != StreamHeaderKey.PAYLOAD_ENCODING}
        self.payload = _Unspoken()
        self.payload.update(payload)

    def result(self) -> Shareable:
        return self.payload


@made_for("nvflare.fuel.f3.cellnet.cell:Cell._process_reply", "nvflare.fuel.f3.cellnet.cell:Cell._send_one_request")
class Replies:
    def __init__(self, cell: Cell) -> None:
        self.cell, self.handler = cell, BlobHandler(cell._process_reply)

    def announced(self, topic: str, comes: Callable[[StreamFuture, Stream, bool], int]) -> None:
        """Call a function for each reply on a topic before the reply is accepted."""
        self.cell.register_stream_cb(CellChannel.RETURN_ONLY, topic, comes)

    def take(self, future: StreamFuture, stream: Stream, resume: bool) -> int:
        return self.handler.handle_blob_cb(future, stream, resume)

    def is_awaited(self, stream: Stream) -> bool:
        return stream.get_headers().get(StreamHeaderKey.STREAM_REQ_ID) in self.cell.requests_dict

    def refuse(self, stream: Stream, reason: str) -> int:
        """Reject an announced reply, so that the request for this reply fails at once."""
        self.settle(stream, make_reply(ReturnCode.MSG_TOO_BIG, error=reason))
        end_stream(stream, reason)
        return 0

    def settle(self, stream: Stream, reply: Message) -> int:
        """Answer a request by the given reply, instead of by the reply that was announced."""
        waiter = self.cell.requests_dict.get(stream.get_headers().get(StreamHeaderKey.STREAM_REQ_ID))
        if waiter:
            _settle(waiter, reply)
        return 0


@made_for("nvflare.fuel.f3.streaming.download_service:_download_object")
def send_requests_by(cell: Cell, request: Send) -> Send:
    """Make a cell send its requests through another function, and return NVFlare's function for sending requests."""
    own: Send = cell.send_request
    cell.send_request = request
    return own


@made_for(
    "nvflare.fuel.f3.cellnet.cell:Adapter._send_response",
    merged=lambda: "reply_once" in signature(Cell._register_request_cb).parameters,
)
def reply_once(cell: Cell, to: tuple[str, str]) -> None:
    """Make NVFlare send each reply to a request on the given channel and topic only once. Without the patch, NVFlare
    would send a reply again if the reply was not confirmed.
    """
    own = cell.send_blob

    def send(channel: str, topic: str, *args: Any, **kwargs: Any) -> StreamFuture:
        if (channel, topic) == (CellChannel.RETURN_ONLY, ":".join(to)):
            kwargs["reliable"] = False
        return own(channel, topic, *args, **kwargs)

    cell.send_blob = send


@made_for("nvflare.fuel.f3.cellnet.cell:Cell._send_one_request", "nvflare.fuel.f3.streaming.byte_receiver:RxTask.stop")
def end_reply(request: Message) -> None:
    """End the stream of a reply after this process has requested the reply again."""
    own = request.get_header(StreamHeaderKey.STREAM_REQ_ID)
    with RxTask.map_lock:
        tasks = [task for task in RxTask.rx_task_map.values() if _request_of(task) == own]
    for task in tasks:
        task.stop(StreamError("the reply was requested again"))


def received(cell: Cell, request: Message) -> int:
    """Return the number of bytes of the reply to a request have arrived so far."""
    waiter = cell.requests_dict.get(request.get_header(StreamHeaderKey.STREAM_REQ_ID))
    return waiter.receiving_future.get_progress() if waiter and waiter.receiving_future else 0


def _request_of(task: RxTask) -> str | None:
    return (task.headers or {}).get(StreamHeaderKey.STREAM_REQ_ID)


@made_for(
    "nvflare.fuel.f3.cellnet.cell:Cell._send_one_request",
    "nvflare.fuel.f3.cellnet.core_cell:CoreCell.set_cell_disconnected_cb",
    "nvflare.fuel.f3.cellnet.core_cell:CoreCell.state_change",
)
class LostWaits:
    """Ends a waiting request when its connection is lost, so that the request's sender repeats the request.

    NVFlare itself sends a request only once, and would wait until the time limit of the request. A request is not ended
    if its reply has begun to arrive, because NVFlare sends the missing bytes of a reply again.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        # for each waiting request, a function that returns True if the other process has certainly received the request
        self.waiting: dict[int, tuple[Message, Callable[[], bool]]] = {}
        cell.core_cell.set_cell_disconnected_cb(self._lost)

    @contextmanager
    def of(self, request: Message, has_arrived: Callable[[], bool]) -> Iterator[None]:
        """Inside the `with` block, end a request if its connection is lost.

        Args:
            has_arrived: Returns True if the other process has certainly received the request. Such a request is not
                ended.
        """
        self.waiting[id(request)] = request, has_arrived
        try:
            yield
        finally:
            del self.waiting[id(request)]

    def _lost(self, other: CellAgent) -> None:
        if FQCN.is_ancestor(self.cell.get_fqcn(), other.get_fqcn()):
            return  # the lost connection is to a child cell, such as a training script's cell, and carries no requests
        for request, has_arrived in [*self.waiting.values()]:
            waiter = self.cell.requests_dict.get(request.get_header(StreamHeaderKey.STREAM_REQ_ID))
            if waiter and not waiter.in_receiving.is_set() and not has_arrived():
                _settle(waiter, make_reply(ReturnCode.COMM_ERROR, error="the connection was lost"))


def _settle(waiter: SimpleWaiter, reply: Message) -> None:
    """Answer a waiting request by a reply that this process created."""
    waiter.stream_error = "it is not read"
    waiter.result = reply
    waiter.in_receiving.set()


def ping() -> Message:
    """Create a small request for a process that sends tensors; such a process always replies."""
    return new_cell_message({}, {_PropKey.REF_ID: "ping", _PropKey.CANCEL: True})


@made_for("nvflare.fuel.f3.streaming.download_service:_download_object")
class AskedPiece:
    def __init__(self, request: Message) -> None:
        self.asked: dict[str, Any] = request.payload
        self.tensors: str = self.asked[_PropKey.REF_ID]
        self.number, _ = asked_for(self.asked.get(_PropKey.STATE))

    def other(self, number: int, together: int) -> Message:
        """Return a request for `together` pieces of the tensors that the received request names, starting with piece
        `number`.
        """
        return new_cell_message({}, {**self.asked, _PropKey.STATE: {NEXT: number, TOGETHER: together}})

    def confirm(self, cell: Cell, end: Message, source: str) -> None:
        """If the sender of the tensors wants a confirmation, confirm that all pieces have arrived.

        Args:
            end: The sender's last reply.
            source: The sender's cell.
        """
        told = end.payload if isinstance(end.payload, dict) else {}
        if told.get(_PropKey.CONFIRM_EXPECTED):
            all_came = {
                _PropKey.CONFIRM: DownloadStatus.SUCCESS,
                _PropKey.CONFIRM_NONCE: told.get(_PropKey.CONFIRM_NONCE),
            }
            message = new_cell_message({}, {_PropKey.REF_ID: self.tensors, **all_came})
            cell.fire_and_forget(OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, source, message, optional=True)


def has_stopped(cell: Cell) -> bool:
    return cell.core_cell.asked_to_stop


def no_more() -> Message:
    """Return the reply that ends a transfer after all pieces were sent."""
    return make_reply(ReturnCode.OK, body={_PropKey.STATUS: ProduceRC.EOF})


def asked_for(state: dict[str, int] | None) -> tuple[int, int]:
    given = state or {}
    return given.get(NEXT, 0), given.get(TOGETHER, 1)


def pieces_in(reply: Message) -> int:
    """Return the total number of pieces that a reply states, or 0 if a reply does not state this number."""
    match reply.payload:
        case {_PropKey.STATE: {"pieces": int(pieces)}}:
            return pieces
    return 0


# ---------------------------------------------------------------------------------------------------- the server
class _EachOnce(list):
    def append(self, item: object) -> None:
        if not any(item is known for known in self):
            super().append(item)


def sends_again() -> bool:
    """Return True if the installed NVFlare sends a lost task again to the same client, instead of a later task."""
    from nvflare.apis.impl.wf_comm_server import _TASK_KEY_MANAGER, TaskCheckStatus, WFCommServer

    for later in (TaskCheckStatus.SEND, TaskCheckStatus.NO_BLOCK):
        client, tasks = Client("trial", "trial"), [Task("trial", Shareable()) for _ in range(2)]
        for task in tasks:
            task.props[_TASK_KEY_MANAGER] = SimpleNamespace(check_task_send=lambda *_, status=later: status)
        lost = ClientTask(client, tasks[0])
        tasks[0].last_client_task_map[client.name] = lost
        server = WFCommServer()
        server._tasks = tasks
        if server.process_task_request(client, FLContext())[1] != lost.id or tasks[0].client_tasks:
            return False
    return True


@made_for("nvflare.apis.impl.wf_comm_server:WFCommServer.process_task_request", merged=sends_again)
def deliver_once(task: Task) -> None:
    """Make a task record each delivery to a client only once, even if NVFlare sends the task several times."""
    task.client_tasks = _EachOnce()


def gives_cell() -> bool:
    """Return True if the installed NVFlare's engine has a method that returns the cell of a job."""
    from nvflare.private.fed.server.server_engine import ServerEngine

    return hasattr(ServerEngine, "get_job_cell")


@made_for(
    "nvflare.private.fed.app.simulator.simulator_runner:SimulatorRunner.start_server_app",
    merged=gives_cell,
    whole=False,
)
def cell_of_job(fl_ctx: FLContext) -> Cell:
    """Return the cell that receives the sites' answers, in a real job or in the simulator."""
    engine = fl_ctx.get_engine()
    return engine.get_job_cell() if is_merged("cell_of_job") else engine.server.command_agent.cell


# ---------------------------------------------------------------------------------------------------- both sides
class _Lossy:
    """A log file that drops lines which can't be written, and raises no error."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.fails = file, False

    def write(self, text: str) -> None:
        self._do(self.file.write, text)

    def flush(self) -> None:
        self._do(self.file.flush)

    def close(self) -> None:
        self._do(self.file.close)

    def _do(self, action: Callable[..., Any], *args: str) -> None:
        try:
            action(*args)
        except OSError as error:
            if not self.fails:
                LOG.warning("the job's audit can't be written (%s)", type(error).__name__)
            self.fails = True
        else:
            # A written line stays in memory until the next flush, so only a successful flush shows that the disk has
            # space again.
            self.fails = self.fails and action != self.file.flush


class _Full:
    """A log file that behaves as if the disk were full."""

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "a full disk")


def outlives_a_full_disk() -> bool:
    """Return True if the installed NVFlare raises no error when it can't write a line of an audit log."""
    auditor = audit.Auditor.__new__(audit.Auditor)
    auditor.audit_file, auditor._lock = _Full(), threading.Lock()
    told, silent = logging.getLogger(audit.__name__), logging.Filter("nobody")
    # this function provokes an error on purpose, which must not be logged as if the disk were full
    told.addFilter(silent)
    try:
        auditor.add_job_event("")
    except OSError:
        return False
    finally:
        told.removeFilter(silent)
    return True


@made_for(
    "nvflare.fuel.sec.audit:Auditor.add_job_event",
    "nvflare.fuel.sec.audit:Auditor.close",
    merged=outlives_a_full_disk,
)
def audit_without_fail() -> None:
    """Drop each line of this job's audit log that can't be written; without this patch, NVFlare would raise an
    error.
    """
    auditor = AuditService.get_auditor()
    if hasattr(auditor, "audit_file"):  # the simulator's auditor has no file
        with auditor._lock:
            if auditor.audit_file and not isinstance(auditor.audit_file, _Lossy):
                auditor.audit_file = _Lossy(auditor.audit_file)


# ---------------------------------------------------------------------------------------- training scripts
BACKEND = "nvflare.app_common.executors.client_api.external_process_backend:ExternalProcessBackend"


@made_for(f"{BACKEND}._trainer_liveness_error", f"{BACKEND}._trainer_exit_reason")
def hear_of_killed_script(heard: Callable[[int], object]) -> None:
    """Call a function when the system has killed a training script's process, for example because memory was exhausted.

    Without this patch, a job would fail in its present task and in all later tasks after the system has killed a
    script's process.

    Args:
        heard: Called with the number of the signal that killed the process.
    """
    from nvflare.app_common.executors.client_api.external_process_backend import ExternalProcessBackend

    in_task, after_it = ExternalProcessBackend._trainer_liveness_error, ExternalProcessBackend._trainer_exit_reason

    def told(why: str | None, trainer: Any) -> str | None:
        code = trainer.process.poll() if why and trainer.process else None
        if code is not None and code < 0:
            heard(-code)
        return why

    ExternalProcessBackend._trainer_liveness_error = lambda own, trainer: told(in_task(own, trainer), trainer)
    ExternalProcessBackend._trainer_exit_reason = staticmethod(lambda trainer: told(after_it(trainer), trainer))
