"""Send tensors in small pieces, so that only a few pieces are lost when a connection breaks.

NVFlare 2.9 sends each tensor as a whole, and sends the whole tensor again after a connection has broken. This module
repeats only the requests for lost pieces, and adapts the number of simultaneous requests to the connection's speed.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from threading import Thread
from time import monotonic, sleep
from typing import Any, ClassVar, Protocol
from zipfile import ZipFile

import numpy as np
import torch
from numpy.lib.format import read_array
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.cacheable import ItemConsumer
from nvflare.fuel.f3.streaming.download_service import (
    OBJ_DOWNLOADER_CHANNEL,
    OBJ_DOWNLOADER_TOPIC,
    ProduceRC,
    download_object,
)
from nvflare.fuel.utils.fobs.datum import Datum
from safetensors.torch import load
from torch import Tensor

from nvflare_reliability.errors import Rejected, TryAgain
from nvflare_reliability.liveness import ANSWERS, CHANNEL, READING
from nvflare_reliability.patches import (
    GARBAGE,
    NEXT,
    PIECES,
    AskedPiece,
    LostWaits,
    asked_for,
    end_reply,
    has_stopped,
    no_more,
    pieces_in,
    ping,
    received,
    reply_once,
    send_requests_by,
)
from nvflare_reliability.timeouts import Timeouts

# PyTorch warns that the buffer of a received tensor is read-only; this is no problem, because no code writes to the
# buffer
warnings.filterwarnings("ignore", "The given buffer is not writable")
FEW = 1 << 16  # minimum bytes of a piece that is sent without being copied into the body of the message
KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TYPES = {dtype: kind for kind, dtype in KINDS.items()}
Tensors = dict[str, Tensor]
LEAST = 1 << 20  # minimum bytes of an unsplit tensor that is stored in a file; smaller tensors stay in memory
MOST_AXES = 64
MARK = "|"  # separates three texts in a piece's name: the tensor's name, the piece's index and the tensor's shape


class Store(Protocol):
    end: int

    def append(self, tensor: Tensor) -> int:
        """Append a tensor's bytes to the file, and return the offset of these bytes in the file. Raise Rejected if
        writing fails.
        """

    def align(self) -> None:
        """Pad the file, so that the offset of the next tensor is aligned for any type of tensor."""

    def mapped(self) -> Tensor:
        """Return the whole file as a memory-mapped tensor of bytes."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor as bytes without copying it.

    The tensor is first viewed as uint8, because NumPy has no type for bfloat16.
    """
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def in_pieces(tensors: Tensors, most: int) -> Tensors:
    """Split tensors into pieces of at most `most` bytes. A piece is a view of its tensor.

    A small tensor is not split into pieces, and keeps its name. A tensor whose name contains MARK
    always becomes numbered pieces, even if it is small.
    """
    pieces: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.nbytes <= most and MARK not in name:
            pieces[name] = tensor.contiguous()  # NVFlare can't send a tensor that is not contiguous in memory
            continue
        shape = ",".join(map(str, tensor.shape))
        parts = tensor.reshape(-1).split(max(1, most // tensor.element_size()))
        pieces |= {f"{name}{MARK}{number}{MARK}{shape}": part for number, part in enumerate(parts)}
    return pieces


def in_one(pieces: Tensors, join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Tensors:
    """Join the pieces of tensors. Raise Rejected if the pieces do not fit together."""
    tensors: Tensors = {}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, piece in pieces.items():
        name, *mark = key.rsplit(MARK, 2)
        if mark:
            parts.setdefault((name, mark[-1]), {})[mark[0]] = piece
        else:
            tensors[name] = piece
    for (name, shape), part in parts.items():
        try:
            sizes = [int(size) for size in shape.split(",") if size]
            whole = join([part[str(number)] for number in range(len(part))])
            if name in tensors or min(sizes, default=0) < 0 or len(sizes) > MOST_AXES:
                raise ValueError(name)
            tensors[name] = whole.reshape(sizes)
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise Rejected("its answer can't be read: its tensors came in pieces that do not fit together") from error
    return tensors


def packed(name: str, piece: Tensor) -> list[Any]:
    """Encode a piece of a tensor as a list: the piece's name, number type, shape and bytes.

    A piece of at least FEW bytes is not copied.
    """
    content = bytes_of(piece.contiguous())
    sent = Datum.blob_datum(content) if len(content) >= FEW else bytes(content)
    return [name, TYPES[piece.dtype], list(piece.shape), sent]


def unpacked(piece: Any) -> Tensors:
    """Decode a received piece of a tensor; return a dictionary that maps the piece's name to the piece."""
    name, kind, shape, sent = piece
    content = sent.value if isinstance(sent, Datum) else sent
    if not isinstance(name, str) or not isinstance(content, bytes) or min(shape, default=0) < 0:
        raise ValueError(kind)
    # a piece of a split tensor need not be copied here, because joining the pieces copies each piece
    own = content if MARK in name else bytearray(content)
    tensor = torch.frombuffer(own, dtype=KINDS[kind]) if own else torch.empty(0, dtype=KINDS[kind])
    return {name: tensor.reshape(shape)}


def arrays_of(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in an .npz file.

    Raise ValueError if the arrays have more bytes than the file, because a compressed file could expand without limit.
    """
    with ZipFile(BytesIO(content)) as file:
        if sum(part.file_size for part in file.infolist()) > len(content):
            raise ValueError("compressed")
        return {name.removesuffix(".npy"): read_array(file.open(name)) for name in file.namelist()}


def side_by_side(pieces: list[Tensor]) -> Tensor:
    """Join the flat pieces of a tensor, without copying pieces that are adjacent in memory."""
    first, size, end = pieces[0], 0, pieces[0].data_ptr()
    for piece in pieces:
        if piece.dtype != first.dtype or piece.data_ptr() != end or not piece.is_contiguous():
            return torch.cat(pieces)
        size, end = size + piece.numel(), end + piece.nbytes
    return first.as_strided((size,), (1,))


class ArrivingTensors(ItemConsumer):
    """Collects tensors that arrive piece by piece. The object can store the large tensors in a file.

    The file is memory-mapped, so the operating system can remove parts of the file from memory and read these parts
    again later. Memory mapping lets the server receive the answers of many sites at once.
    """

    def __init__(self, store: "Callable[[], Store] | None", read: Callable[[Any], Mapping] = unpacked) -> None:
        """Create an empty collection of tensors.

        Args:
            store: Creates a file for large tensors. With None, all tensors stay in memory.
            read: Decodes a received value, and returns tensors by name.
        """
        super().__init__()
        self._new_store, self._read = store, read
        self.problem: Rejected | None = None
        self._store: Store | None = None
        # offset, number of bytes, number type and shape of each piece in the file
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        self._held: Tensors = {}

    def consume_items(self, items: list, result: Any) -> Any:
        try:
            for item in items:
                self.take(self._read(item))
        # all errors are caught, because after an error NVFlare would request the same values again and again
        except Exception as error:
            self.problem = error if isinstance(error, Rejected) else Rejected("a piece of a tensor is not what it says")
            raise self.problem from error
        return {}

    def take(self, pieces: Mapping[str, Any]) -> None:
        for key, piece in pieces.items():
            _, *mark = key.rsplit(MARK, 2)
            if not self._new_store or (not mark and piece.nbytes < LEAST):
                self._held[key] = piece
                continue
            self._store = self._store or self._new_store()
            if not mark or mark[0] == "0":
                self._store.align()
            self._places[key] = self._store.append(piece), piece.nbytes, piece.dtype, tuple(piece.shape)

    def whole(self) -> Tensors:
        """Join the pieces of all received tensors, and return the tensors. Raise Rejected if pieces do not fit
        together.
        """
        content = self._store.mapped() if self._store and self._store.end else torch.empty(0, dtype=torch.uint8)
        filed = {
            key: content[begin : begin + size].view(dtype).reshape(shape)
            for key, (begin, size, dtype, shape) in self._places.items()
        }
        return in_one(self._held | filed, side_by_side if self._new_store else torch.cat)


class Fetching:
    """Records when another process last requested tensors of this process, and whether the other process has received
    all tensors.
    """

    def __init__(self) -> None:
        self.last, self.all = -math.inf, True

    def saw(self, ended: bool) -> None:
        """Record another process's request for a piece of a tensor. `ended` is true if the other process already has
        all pieces.
        """
        self.last, self.all = monotonic(), ended

    def silence(self) -> float:
        """Return the seconds since another process last requested a piece of a tensor."""
        return monotonic() - self.last


FETCHING = Fetching()  # a process needs only one object of this class, because each process runs only one job


def site_of(process: str) -> str:
    """Return the name of a site from the cell name of the site's job process. A cell name may begin with the names of
    relays.
    """
    return process.rpartition(".")[0].rpartition(".")[2]


class _Chunks(TensorDownloadable):
    """Divides tensors into numbered chunks: small tensors share a chunk, and a large tensor is split into pieces."""

    def __init__(self, tensors: Tensors, most: int) -> None:
        parts = in_pieces(tensors, most)
        super().__init__(parts, most)
        self.tensors: Tensors | None = parts
        self.pieces: list[list[str]] = []  # for each chunk, the names of all tensors and pieces of tensors in the chunk
        room = 0
        for name, part in parts.items():
            room -= part.nbytes
            if room < 0 or not self.pieces:
                self.pieces.append([])
                room = most - part.nbytes
            self.pieces[-1].append(name)

    def produce(self, state: dict, requester: str) -> tuple[str, Any, dict]:
        (number, together), parts = asked_for(state), self.tensors
        ended = number >= len(self.pieces)
        FETCHING.saw(ended)
        if ended:
            return ProduceRC.EOF, None, {}
        if parts is None:
            raise TryAgain("nobody asks for these tensors any more")
        given = self.pieces[number : number + max(1, min(together, MOST_TOGETHER))]
        names = [name for own in given for name in own]
        GARBAGE.sent(sum(parts[name].nbytes for name in names))
        items = [packed(name, parts[name]) for name in names]
        return ProduceRC.OK, items, {NEXT: number + len(given), PIECES: len(self.pieces)}

    def release(self) -> None:
        self.tensors = None
        FETCHING.all = True  # NVFlare releases the tensors when the transfer has ended
        super().release()


AHEAD = 1.0  # Pieces that will arrive within this many seconds at the measured speed are requested in advance.
MOST_AHEAD = 32  # maximum number of pieces that are requested in advance
MOST_TOGETHER = 8


@dataclass
class _OnTheirWay:
    # Maps the index of a reply's first piece to the expected reply, and to the number of pieces in the reply.
    coming: dict[int, tuple[Future[Message], int]] = field(default_factory=dict)
    next: int = 1
    came: int = 0
    there: int | None = None
    since: float = field(default_factory=monotonic)
    ended: bool = False

    def room(self) -> int:
        """Return the number of pieces that may be requested in advance at the measured speed of the connection."""
        return min(MOST_AHEAD, 1 + math.ceil(AHEAD * self.came / max(monotonic() - self.since, 0.001)))

    def next_ones(self, after: int, there: int) -> Iterator[tuple[int, int]]:
        """Yield the next requests. A request consists of two numbers: the index of the first piece, and how many pieces
        are requested.

        On a fast connection, one reply has several pieces, because each reply costs both processes time.
        """
        self.next = max(self.next, after)
        while self.next < min(there, after + self.room()):
            together = min(max(1, self.room() * MOST_TOGETHER // MOST_AHEAD), there - self.next)
            yield self.next, together
            self.next += together


# running transfers; each key is NVFlare's reference ID of the transferred tensors
ON_THEIR_WAY: dict[str, _OnTheirWay] = {}


class ChunkedTensors(TensorDecomposer):
    """Sends tensors through NVFlare's download service, in pieces of limited size."""

    # creates a file for large tensors that arrive in this process; with None, these tensors stay in memory
    store: "ClassVar[Callable[[], Store] | None]" = None

    def to_downloadable(self, items: dict, max_chunk_size: int, fobs_ctx: dict) -> TensorDownloadable:
        return _Chunks(items, max_chunk_size)

    def download(self, *, ref_id: str, fobs_ctx: Any = None, **kwargs: Any) -> tuple[str, dict]:
        own = ON_THEIR_WAY[ref_id] = _OnTheirWay()
        try:
            return fetched(ArrivingTensors(type(self).store), ref_id=ref_id, **kwargs)
        finally:
            own.ended = True
            ON_THEIR_WAY.pop(ref_id, None)


def fetched(arriving: ArrivingTensors, **kwargs: Any) -> tuple[str, dict]:
    """Fetch tensors from another process. Raise Rejected if the tensors are unreadable.

    Args:
        **kwargs: Arguments of NVFlare's `download_object`.

    Returns:
        The error of the connection or an empty text, and the tensors by name.
    """
    download_object(consumer=arriving, **kwargs)
    if (problem := arriving.problem) is not None:
        raise Rejected(f"its answer was not taken: {problem}", problem.private)
    return (arriving.error, {}) if arriving.error else ("", arriving.whole())


class PlainTensors(TensorDecomposer):
    """Sends tensors in NVFlare's own format, which the process of a training script can read."""

    def download(self, *, fobs_ctx: Any = None, **kwargs: Any) -> tuple[str, dict]:
        return fetched(ArrivingTensors(None, load), **kwargs)


class PlainArrays(NumpyArrayDecomposer):
    """Sends NumPy arrays in NVFlare's own format, and rejects compressed arrays."""

    def download(self, *, fobs_ctx: Any = None, **kwargs: Any) -> tuple[str, dict]:
        return fetched(ArrivingTensors(None, arrays_of), **kwargs)

    def native_recompose(self, data: bytes, manager: Any = None) -> np.ndarray:
        return read_array(BytesIO(data))


# errors after which a repeated request may succeed, because the connection may be restored
PASSING = (ReturnCode.TIMEOUT, ReturnCode.COMM_ERROR, ReturnCode.TARGET_UNREACHABLE)
PAUSE = 1.0
SOONEST = 2.0  # minimum seconds after which a piece counts as late, even on a fast connection
UNKNOWN = 10.0  # seconds after which a piece counts as late if the connection's speed is still unknown


class Pace:
    """Estimates how long the transfer of a piece takes on a connection. The estimate is smoothed as in TCP (RFC 6298).

    Replies arrive roughly in the order of their requests. A reply counts as lost when the reply to a much later request
    has arrived. If no reply arrives at all, one thread sends pings until the connection is restored.
    """

    def __init__(self) -> None:
        # smoothed transfer time of a piece, and smoothed deviation of the transfer time, in seconds; 0 before the first
        # piece
        self.smooth, self.varies = 0.0, 0.0
        self.due: list[_Wanted] = []  # the expected replies, in the order in which the pieces were first requested
        self.last = -math.inf
        self.came = -math.inf

    def late(self) -> float:
        """Return the number of seconds between a piece's request and the time at which the piece counts as late."""
        return max(SOONEST, self.smooth + 4 * self.varies) if self.smooth else UNKNOWN

    def on_reply(self, requested_at: float) -> None:
        self.came, self.last = max(self.came, requested_at), monotonic()

    def took(self, seconds: float) -> None:
        self.smooth, self.varies = self.smooth or seconds, self.varies or seconds / 2
        self.varies += (abs(seconds - self.smooth) - self.varies) / 4
        self.smooth += (seconds - self.smooth) / 8


@dataclass(eq=False)
class _Wanted:
    """A reply that contains pieces of a tensor; a separate thread waits for this reply."""

    transfer: _OnTheirWay
    line: Pace
    patience: Timeouts
    cell: Cell
    send: Callable[..., Message]
    request: dict[str, Any]
    pieces: int
    begun: float = field(default_factory=monotonic)
    asked: float = 0.0

    def come(self) -> Message:
        """Repeat the request for the pieces until the reply arrives or the transfer has ended; return the reply."""
        again = False
        while True:
            self.asked = monotonic()
            given = {"timeout": min(self.line.late(), self.patience.again), "progress_wait_cb": self._may_come}
            reply = self.send(**self.request | given)
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
            if code not in PASSING:
                self.line.on_reply(self.asked)
                self.transfer.came += self.pieces
                # the time of a repeated request is not measured, because a reply does not show to which of the two
                # requests it belongs
                if not again:
                    self.line.took(monotonic() - self.asked)
                return reply
            end_reply(self.request["request"])
            # after a failed request, the measurement of the connection's speed starts again
            self.transfer.came, self.transfer.since = 0, monotonic()
            if self._is_over():
                return make_reply(ReturnCode.SERVICE_UNAVAILABLE, error=f"silent for {self.patience.silence:g} s")
            again |= code == ReturnCode.TIMEOUT
            sleep(max(0.0, self.asked + PAUSE - monotonic()))

    def _is_over(self) -> bool:
        aborted = self.request.get("abort_signal")
        ended = self.transfer.ended or has_stopped(self.cell) or bool(aborted and aborted.triggered)
        return ended or monotonic() - self.begun > self.patience.silence

    def _may_come(self) -> bool:
        before = self._received()
        if self._is_silent():
            while self._is_silent() and not self._is_over():
                self._look()
            sleep(PAUSE)  # the reply may arrive shortly after the connection is restored
        lost = self.line.came > self.asked + AHEAD and self._received() == before
        return not lost and not self._is_over()

    def _received(self) -> int:
        return received(self.cell, self.request["request"])

    def _is_silent(self) -> bool:
        return monotonic() - max(self.line.last, self.asked) > self.line.late()

    def _look(self) -> None:
        """Send a ping if this reply is the first expected reply on the connection; otherwise wait for a moment."""
        asked = monotonic()
        if self.line.due[0] is self:
            reply = self.send(**self.request | {"request": ping(), "timeout": SOONEST})
            if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK:
                return self.line.on_reply(asked)
        sleep(max(0.0, asked + PAUSE / 4 - monotonic()))


@dataclass(eq=False)
class _Unanswered:
    """Finds out whether an answer, or the server's reply to the answer, was lost between this process and the server.

    The answer or the reply may have been lost on any connection between this process and the server, for example on
    that of a relay.
    """

    # reports whether the server still reads an answer of this process; None means that this is unknown
    ask: Callable[[], bool | None]
    most: float  # maximum seconds without any information from the server
    heard: float = field(default_factory=monotonic)
    idle: bool = False  # True if the server last reported that it reads no answer of this process

    def may_come(self) -> bool:
        """Ask the server whether it still reads the answer, and return True if the server's reply may still come.

        If the server reads no answer of this process, the server's reply may be in transit. The reply counts as lost if
        the server reads no answer at two successive calls of this method.
        """
        reads = self.ask()
        if reads is None:
            return monotonic() - self.heard < self.most
        lost, self.heard, self.idle = self.idle and not reads, monotonic(), not reads
        return not lost


class RetryingRequests:
    """Sends the requests of a job's process, and repeats lost requests until the time limits are over.

    Args:
        cell: The cell of the process.
        patience: The time limits.
        sees_fetching: True if `FETCHING` records when another process requests this process's tensors. Otherwise, this
            process asks the server whether the server still reads an answer. If the server does not say so, NVFlare's
            own time limit applies to the answer.
    """

    def __init__(self, cell: Cell, patience: Timeouts, sees_fetching: bool = True) -> None:
        self.patience, self.cell, self.send = patience, cell, send_requests_by(cell, self.request)
        self.sees_fetching, self.waits = sees_fetching, LostWaits(cell)
        reply_once(cell, (OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC))
        self.fetchers = ThreadPoolExecutor(256, "pieces")
        # speed of each connection; the key is the name of the process that sends the tensors
        self.lines: defaultdict[str, Pace] = defaultdict(Pace)
        # the processes that are now receiving the report that all pieces have arrived
        self.informed = set[str]()

    def end_fetchers(self) -> None:
        """Stop the threads that fetch tensors, because NVFlare warns about threads that still run when a job ends."""
        ended, self.fetchers = self.fetchers, ThreadPoolExecutor(256, "pieces")
        ended.shutdown(wait=False)

    def request(self, *args: Any, **kwargs: Any) -> Message:
        """Send a request, and return the reply; this method replaces the method `send_request` of the cell."""
        if kwargs.get("channel") == OBJ_DOWNLOADER_CHANNEL:
            return self._fetch(**kwargs)
        if kwargs.get("topic") == ServerCommandNames.GET_TASK:
            with self.waits.of(kwargs["request"], lambda: False):
                return self.send(*args, **kwargs | {"timeout": 2 * self.patience.again})
        if kwargs.get("topic") == ServerCommandNames.SUBMIT_UPDATE:
            began = monotonic()
            may_come = self._is_being_fetched
            if not self.sees_fetching:
                may_come = _Unanswered(partial(self._is_being_read, str(kwargs["target"])), kwargs["timeout"]).may_come
            kwargs |= {"timeout": self.patience.again, "progress_wait_cb": may_come}
            with self.waits.of(kwargs["request"], lambda: FETCHING.last > began):
                return self.send(*args, **kwargs)
        return self.send(*args, **kwargs)

    def _fetch(self, request: Message, **kwargs: Any) -> Message:
        """Return the reply to a request for a piece of a tensor, and request the following pieces in advance."""
        piece = AskedPiece(request)
        own = ON_THEIR_WAY.get(piece.tensors)
        if own is None:  # the other process does not use this module to split tensors into pieces
            return self._patiently(_OnTheirWay(), request=request, **kwargs)
        coming, together = own.coming.pop(piece.number, (None, 1))
        source = str(kwargs["target"])
        if not coming and piece.number == own.there and source not in self.informed:
            self.informed.add(source)
            Thread(target=self._tell_end, args=(piece, request), kwargs=kwargs, daemon=True).start()
            return no_more()
        if piece.number == 0:
            self._ask_ahead(own, piece, 1, 2, kwargs)
        reply = coming.result() if coming else self._patiently(own, request=request, **kwargs)
        after, there = piece.number + together, pieces_in(reply)
        own.there = there if after >= there > 0 else None
        self._ask_ahead(own, piece, after, there, kwargs)
        return reply

    def _tell_end(self, piece: AskedPiece, request: Message, **kwargs: Any) -> None:
        """Report to the sender of the tensors that all pieces have arrived. This method runs in a separate thread.

        The sender keeps the tensors until it receives the report that all pieces have arrived, because the sender may
        have to repeat a piece.
        """
        try:
            with suppress(RuntimeError):
                piece.confirm(self.cell, self._patiently(_OnTheirWay(), request=request, **kwargs), kwargs["target"])
        finally:
            self.informed.discard(str(kwargs["target"]))

    def _ask_ahead(self, own: _OnTheirWay, piece: AskedPiece, after: int, there: int, asked: dict[str, Any]) -> None:
        """Request the next pieces in advance; on a faster connection, request more pieces."""
        for number, together in own.next_ones(after, there):
            asking = {**asked, "request": piece.other(number, together)}
            own.coming[number] = self.fetchers.submit(self._patiently, own, together, **asking), together

    def _patiently(self, own: _OnTheirWay, pieces: int = 1, **kwargs: Any) -> Message:
        """Repeat a request for pieces of a tensor until the pieces arrive or the time limit is over."""
        line = self.lines[str(kwargs.get("target"))]
        wanted = _Wanted(own, line, self.patience, self.cell, self.send, kwargs, pieces)
        line.due.append(wanted)
        try:
            return wanted.come()
        finally:
            line.due.remove(wanted)

    def _is_being_fetched(self) -> bool:
        """Return True if the server may still be fetching the tensors of this site's answer."""
        return FETCHING.silence() < (2 * self.patience.again if FETCHING.all else self.patience.silence)

    def _is_being_read(self, server: str) -> bool | None:
        """Ask the server's job process whether it still reads an answer of this process. Return None if the server's
        job process did not reply.
        """
        where = {"channel": CHANNEL, "topic": READING, "target": server}
        reply = self.send(**where, request=new_cell_message({}), timeout=ANSWERS, optional=True)
        known = reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK and isinstance(reply.payload, bool)
        return reply.payload if known else None
