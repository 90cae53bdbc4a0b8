"""Read sites' answers before NVFlare does, so that no answer can end the server's job process.

NVFlare 2.9 fetches tensors while it decodes an answer; if NVFlare can't decode the answer, NVFlare ends the server's
job process. The gate of this module decodes each answer before NVFlare does. If an answer is too large or unreadable,
the gate rejects the answer, and the job continues.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic

from msgpack import OutOfData, Unpacker, UnpackException
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FqcnInfo
from nvflare.fuel.f3.cellnet.utils import decode_payload, make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError, Stream, StreamError, StreamFuture
from nvflare.fuel.utils.buffer_list import BufferList
from nvflare.fuel.utils.fobs import dots, lobs

from nvflare_reliability import patches
from nvflare_reliability.chunking import site_of
from nvflare_reliability.errors import Rejected, TryAgain, one_line
from nvflare_reliability.liveness import CHANNEL, READING
from nvflare_reliability.message_limits import MOST_OPEN, Gate, MessageLimits

# maximum levels of nesting in a message body; NVFlare's encoding (FOBS) adds two levels around each object
DEEPEST = 100
DOWNLOADS = (dots.TENSOR_DOWNLOAD, dots.NUMPY_DOWNLOAD)
CUT = "its answer can't be read: it was cut short"
LONGEST_REFERENCE = 10_000
LISTS, MAPS = {*range(0x90, 0xA0), 0xDC, 0xDD}, {*range(0x80, 0x90), 0xDE, 0xDF}


def check_outline(blob: Sequence[bytes], most: MessageLimits, origin: str) -> None:
    """Raise Rejected if a message is incomplete, has a forbidden section, or is too large.

    A FOBS message consists of a body in msgpack, and of sections that contain large texts or refer to tensors. A
    decoded body can need a hundred times the memory of the encoded body, so this function counts the body's values
    before decoding.

    Args:
        origin: The sender's cell. The message may refer only to tensors of the sender's cell and of its child cells.
    """
    buffers, place = BufferList(list(blob)), 0
    end = buffers.get_size()
    body: bytes | None = None
    references: list[int] = []
    while place < end:
        marker, dot, size = lobs.HEADER_STRUCT.unpack(_read(buffers, place, lobs.HEADER_LEN, end))
        content = _read(buffers, place + lobs.HEADER_LEN, size, end)
        place += lobs.HEADER_LEN + size
        if body is None:
            if marker != lobs.MARKER_MAIN:
                raise Rejected("its answer can't be read: it does not begin with a body")
            body = content
        elif marker not in (lobs.MARKER_DATUM_TEXT, lobs.MARKER_DATUM_BLOB):
            raise Rejected("its answer has a section that is neither text nor bytes")
        elif dot:
            _check_reference(dot, content[lobs.DATUM_ID_LEN :], origin, references)
    check_body(body or b"", most.values)


def _read(buffers: BufferList, start: int, size: int, end: int) -> bytes:
    if start + size > end:
        raise Rejected(CUT)
    return buffers.read_bytes(start, start + size)


def _check_reference(dot: int, content: bytes, origin: str, seen: list[int]) -> None:
    """Raise Rejected if a section of a message refers to data that are not tensors of the sender.

    A message may have at most one section of each kind.

    Args:
        seen: The kinds of the message's earlier sections. The function adds the kind of this section.
    """
    if dot not in DOWNLOADS or dot in seen:
        raise Rejected("its answer refers to data in a way that is not allowed")
    seen.append(dot)
    try:
        place = json.loads(content) if len(content) <= LONGEST_REFERENCE else None
    except (ValueError, RecursionError):
        place = None
    # the cell of a training script is a child of the cell of the script's site
    if not isinstance(place, dict) or not f"{place.get('fqcn')}.".startswith(f"{origin}."):
        raise Rejected("its answer refers to data that are not its own")


def check_body(body: bytes, most: int) -> None:
    """Raise Rejected if a message's body is not exactly one msgpack value, or is nested more than DEEPEST
    levels deep.
    """
    reader = Unpacker(max_buffer_size=0)
    reader.feed(body)
    left = [1]  # for each open list or map, the number of values that must still be read
    seen = 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        parts = _parts(reader, body)
        seen += 1
        # the announced length of a list counts as memory, because msgpack allocates memory for this length
        if seen + parts > most:
            raise Rejected(f"its answer has more than {most} values")
        left.append(parts)
        if len(left) > DEEPEST:
            raise Rejected(f"its answer is nested more than {DEEPEST} deep")
    if reader.tell() != len(body):
        raise Rejected("its answer can't be read: its body is not one value")


def _parts(reader: Unpacker, body: bytes) -> int:
    """Read the header of a list or a map and return its number of values, or skip any other value and return 0."""
    try:
        code = body[reader.tell()]
        if code in LISTS:
            return reader.read_array_header()
        if code in MAPS:
            return 2 * reader.read_map_header()
        reader.skip()
        return 0
    except (OutOfData, IndexError) as error:
        raise Rejected(CUT) from error
    except (UnpackException, ValueError) as error:
        raise Rejected("its answer can't be read: it holds what is no value") from error


LOG = logging.getLogger(__name__)
UNREAD = "reliability.unread"
Reject = Callable[[Shareable, str], None]
# The return codes that a site's answer may have. Some other return codes would make NVFlare end the job.
CODES = (ReturnCode.OK, ReturnCode.EXECUTION_EXCEPTION, ReturnCode.TASK_ABORTED, ReturnCode.TASK_RESULT_FILTER_ERROR)
READERS = 256  # number of threads that read answers; the number is large, because most threads wait for data
# If the tensors of this many consecutive answers of a site could not be fetched, the last of these answers is rejected.
# If a site restarts, only one answer has tensors that could not be fetched.
MOST_FAILED = 5
# a site may send only these commands to the server's job process
FROM_SITES = (ServerCommandNames.GET_TASK, ServerCommandNames.SUBMIT_UPDATE)


def mark_rejected(answer: Shareable, reason: str) -> None:
    answer.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    answer.set_header("reliability.rejected", reason)


class AnswerGate(Gate):
    """Checks the messages that reach the server's job process, and reads the sites' answers."""

    def __init__(self, cell: Cell, most: MessageLimits, task: str = "", reject: Reject = mark_rejected) -> None:
        """Create a gate for the server's job process.

        Args:
            most: The limits of each message; `allow` can change the limits later.
            task: The name of the tasks that sites answer.
            reject: A function that marks an answer as rejected, and adds the reason to the answer.
        """
        super().__init__(cell, most)
        self.task, self.reject = task, reject
        self.answers: patches.AnswerReader | None = None
        self.readers = ThreadPoolExecutor(READERS, "answers")
        self.open: Counter[str] = Counter()  # number of each sender's answers that are queued or being read
        # for each sender, the number of consecutive answers whose tensors could not be fetched
        self.failed: Counter[str] = Counter()
        self.reading: set[str] = set()
        self.expelled: set[str] = set()
        self.last_heard: dict[str, float] = {}  # time of the last message from each monitored sender

    @property
    def _readers(self) -> list[BlobHandler]:
        return [self.answers.handler] if self.answers else []

    def guard_server(self) -> None:
        """Start to check the sites' messages, and to read the sites' answers before NVFlare reads them."""
        self.answers = patches.AnswerReader(self.cell, self._answered)
        patches.look_at_messages(self.cell, self._inspect)
        self.cell.register_request_cb(channel=CHANNEL, topic=READING, cb=self._is_reading)
        self.watch_fetching()

    def end_readers(self) -> None:
        """Stop the threads that read answers, because NVFlare warns about threads that still run when a job ends."""
        with self.lock:
            self.readers.shutdown(wait=False)
            self.readers = ThreadPoolExecutor(READERS, "answers")

    def _inspect(self, message: Message) -> Message | None:
        """Inspect a message before NVFlare decodes the message. If the result is not None, the result is sent to the
        site as a reply.

        A site may only request tasks and submit answers. Without this gate, NVFlare would accept a site's commands that
        end the job. Without this gate, NVFlare would end the server's job process if a site reported that a message of
        the server was too large.
        """
        origin = str(message.get_header(MessageHeaderKey.ORIGIN))
        if FqcnInfo(origin).is_on_server:
            return None
        if any(f"{origin}.".startswith(f"{cell}.") for cell in [*self.expelled]):
            return make_reply(CellCode.UNAUTHENTICATED)
        if (sender := self._sender(origin)) in self.last_heard:
            self.last_heard[sender] = monotonic()
        channel = message.get_header(MessageHeaderKey.CHANNEL)
        if channel == STREAM_CHANNEL:
            if message.get_header(StreamHeaderKey.ERROR_TYPE) == BlobSizeError.__name__:
                message.set_header(StreamHeaderKey.ERROR_TYPE, StreamError.__name__)
            if not patches.is_piece(message):
                return None
            channel = message.get_header(StreamHeaderKey.CHANNEL)
            if channel != CellChannel.SERVER_COMMAND or message.get_header(StreamHeaderKey.TOPIC) in FROM_SITES:
                return self._streamed(message, self._sender(origin))
        return make_reply(CellCode.INVALID_REQUEST) if channel == CellChannel.SERVER_COMMAND else None

    def _sender(self, origin: str) -> str:
        """Return the name of the site that owns a cell of this job, or an empty text for a cell of another job."""
        hospital, is_of_job = self._of_job(origin)
        return hospital if is_of_job else ""

    def _answered(self, future: StreamFuture, stream: Stream) -> None:
        """Start to read an answer in a thread of this gate. NVFlare calls this method when the first byte of an answer
        arrives.

        NVFlare has a pool of 64 threads that call this method and that also fetch tensors. If threads of the pool read
        answers, 64 simultaneous answers would block each other forever.

        The number of unfinished answers per sender is limited. Without this limit, a sender of endless answers could
        occupy all threads of the gate.
        """
        origin = str(future.headers.get(MessageHeaderKey.ORIGIN))
        with self.lock:
            taken = self.open[origin] < MOST_OPEN
            self.open[origin] += taken
            if taken:
                self.readers.submit(self._pass_on, origin, future, stream)
        if not taken:
            patches.end_stream(stream, f"{MOST_OPEN} answers of this site are open already")

    def _is_reading(self, request: Message) -> Message:
        """Reply to a site's question whether an answer of the site is queued or being read.

        The reply is False once the answer has been read and the server has sent its reply to the answer.
        """
        with self.lock:
            reading = self.open[str(request.get_header(MessageHeaderKey.ORIGIN))] > 0
        return make_reply(CellCode.OK, body=reading)

    def _pass_on(self, origin: str, future: StreamFuture, stream: Stream) -> None:
        try:
            try:
                answer = self._read(origin, future)
            except Rejected as error:
                answer = self._unread(str(error), origin)
            assert self.answers
            self.answers.pass_on(future.headers, answer)
        # The error may come from a broken connection, so the site receives the error and sends its answer again.
        except Exception as error:
            LOG.warning("an answer of %s was not taken", one_line(origin), exc_info=True)
            if not future.error:
                patches.end_stream(stream, one_line(error))
        finally:
            with self.lock:
                self.open -= Counter([origin])

    def _read(self, origin: str, future: StreamFuture) -> Shareable:
        """Return a site's answer. Raise Rejected if the answer is too large or unreadable.

        If an error other than Rejected occurs, the site sends its answer again.
        """
        headers = future.headers
        try:
            blob = future.result()
        except BlobSizeError as error:
            raise Rejected(self._too_large(future.get_size())) from error
        if headers.get(StreamHeaderKey.PAYLOAD_ENCODING) != Encoding.FOBS or not isinstance(blob, list):
            raise Rejected("its answer can't be read: it is packed in another way")
        with self._one_at_a_time(origin):
            check_outline(blob, self.most, origin)
            answer = self._decoded(Message(headers, blob), origin)
            self.failed.pop(self._sender(origin), None)
            return self._checked(answer)

    @contextmanager
    def _one_at_a_time(self, origin: str) -> Iterator[None]:
        with self.lock:
            if origin in self.reading:
                raise TryAgain("an answer of this site is being read already")
            self.reading.add(origin)
            self.taken.pop(origin, None)
            self.refused.pop(origin, None)
        try:
            yield
        finally:
            with self.lock:
                self.reading.discard(origin)

    def _decoded(self, message: Message, origin: str) -> object:
        sender = self._sender(origin)
        try:
            decode_payload(message, StreamHeaderKey.PAYLOAD_ENCODING, fobs_ctx=self.cell.get_fobs_context())
        except Rejected:
            raise
        except Exception as error:
            if origin in self.refused:
                raise Rejected(self.refused[origin]) from error
            if "failed to download" in str(error):
                self.failed[sender] += 1
                if self.failed[sender] < MOST_FAILED:
                    raise TryAgain(one_line(error)) from error
                del self.failed[sender]
                told = f"its tensors could not be fetched, {MOST_FAILED} times in a row; the site's own log says why"
                raise Rejected(told) from error
            LOG.warning("an answer of %s can't be read", one_line(origin), exc_info=True)
            raise Rejected(f"its answer can't be read ({type(error).__name__})") from error
        return message.payload

    def _checked(self, answer: object) -> Shareable:
        """Check an answer and return it; if its return code would end the job, mark the answer as rejected.

        Raise Rejected if NVFlare can't handle the answer.
        """
        headers = answer.get(ReservedHeaderKey.HEADERS) if isinstance(answer, Shareable) else None
        if not isinstance(answer, Shareable) or not isinstance(headers, dict):
            raise Rejected("its answer can't be read: it is not one of NVFlare's")
        if not isinstance(answer.get_peer_context(), FLContext):
            raise Rejected("its answer does not say whose it is")
        code = answer.get_return_code(ReturnCode.OK)
        if code not in CODES:
            self.reject(answer, f"the site answered {code}; its own log says why")
        return answer

    def _unread(self, reason: str, origin: str) -> Shareable:
        """Create a rejected answer that replaces an unreadable answer.

        Args:
            origin: The sender's cell.
        """
        site, job = site_of(origin), origin.rpartition(".")[2]
        context = FLContext()
        context.set_prop(FLContextKey.CURRENT_RUN, job, private=False, sticky=False)
        context.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
        reply = Shareable()
        self.reject(reply, reason)
        reply.set_header(UNREAD, True)
        reply.set_header(FLContextKey.TASK_NAME, self.task)
        reply.set_peer_context(context)
        return reply


def is_unread(answer: Shareable) -> bool:
    return answer.get_header(UNREAD) is True
