"""Tensors in pieces, so that a cut line costs no more than the pieces that were on their way. Requests that a line has
lost are made again, and as many stand at once as the line has room for.

NVFlare 2.9 sends a tensor as a whole however large it is, and starts it again after a cut.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
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
from nvflare.fuel.f3.cellnet.utils import make_reply
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
from nvflare_reliability.patches import (
    GARBAGE,
    NEXT,
    PIECES,
    AskedPiece,
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

warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch's, of pieces that nobody changes
FEW = 1 << 16  # bytes of a piece that is copied into its message
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
LEAST = 1 << 20  # bytes of a tensor that lies in a file, where arriving tensors do
MOST_AXES = 64  # of a tensor
MARK = "|"  # in a piece's name: the tensor's, the piece's number, and the tensor's shape


class Store(Protocol):
    """A file for arriving tensors. It raises Rejected for what it can't take."""

    end: int  # in bytes

    def append(self, tensor: Tensor) -> int:
        """Add a tensor's bytes; return where they begin."""

    def align(self) -> None:
        """Let the next tensor begin where any type of numbers may be mapped."""

    def mapped(self) -> Tensor:
        """Return all bytes, read from the file when they are looked at."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's own memory, as bytes: numpy has no bfloat16."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def in_pieces(tensors: Tensors, most: int) -> Tensors:
    """Return views of tensors, none of more than so many bytes. A name that could be a piece's has one piece."""
    pieces: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.nbytes <= most and MARK not in name:
            pieces[name] = tensor.contiguous()  # NVFlare sends no other, such as channels_last
            continue
        shape = ",".join(map(str, tensor.shape))
        parts = tensor.reshape(-1).split(max(1, most // tensor.element_size()))
        pieces |= {f"{name}{MARK}{number}{MARK}{shape}": part for number, part in enumerate(parts)}
    return pieces


def in_one(pieces: Tensors, join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Tensors:
    """Return the whole tensors; raises Rejected for pieces that make none."""
    tensors: Tensors = {}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, piece in pieces.items():
        name, *mark = key.rsplit(MARK, 2)
        if mark:
            parts.setdefault((name, mark[-1]), {})[mark[0]] = piece
        else:
            tensors[name] = piece
    for (name, shape), own in parts.items():
        try:
            sizes = [int(size) for size in shape.split(",") if size]
            whole = join([own[str(number)] for number in range(len(own))])
            if name in tensors or min(sizes, default=0) < 0 or len(sizes) > MOST_AXES:
                raise ValueError(name)
            tensors[name] = whole.reshape(sizes)
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise Rejected("its answer can't be read: its tensors came in pieces that do not fit together") from error
    return tensors


def packed(name: str, piece: Tensor) -> list[Any]:
    """Return a piece as it travels: what it is, and its bytes, which NVFlare sends from where they lie if they are
    many."""
    content = bytes_of(piece.contiguous())
    sent = Datum.blob_datum(content) if len(content) >= FEW else bytes(content)
    return [name, TYPES[piece.dtype], list(piece.shape), sent]


def unpacked(piece: Any) -> Tensors:
    """Return a piece that came, by its name."""
    name, kind, shape, sent = piece
    content = sent.value if isinstance(sent, Datum) else sent
    if not isinstance(name, str) or not isinstance(content, bytes) or min(shape, default=0) < 0:
        raise ValueError(kind)
    own = content if MARK in name else bytearray(content)  # what is put together is copied then
    tensor = torch.frombuffer(own, dtype=KINDS[kind]) if own else torch.empty(0, dtype=KINDS[kind])
    return {name: tensor.reshape(shape)}


def arrays_of(content: bytes) -> dict[str, np.ndarray]:
    """Return a file's arrays. What is larger than the file was compressed, and can be any number of gigabytes."""
    with ZipFile(BytesIO(content)) as file:
        if sum(part.file_size for part in file.infolist()) > len(content):
            raise ValueError("compressed")
        return {name.removesuffix(".npy"): read_array(file.open(name)) for name in file.namelist()}


def side_by_side(pieces: list[Tensor]) -> Tensor:
    """Return pieces as one tensor: without a copy where they lie one behind the other, as they arrive."""
    first, size, end = pieces[0], 0, pieces[0].data_ptr()
    for piece in pieces:
        if piece.dtype != first.dtype or piece.data_ptr() != end or not piece.is_contiguous():
            return torch.cat(pieces)
        size, end = size + piece.numel(), end + piece.nbytes
    return first.as_strided((size,), (1,))


class ArrivingTensors(ItemConsumer):
    """Tensors that arrive piece by piece, in memory or large ones in a file.

    Of a file memory holds what is looked at, and may drop it again. So the answers of many sites may be on their way at
    once.
    """

    def __init__(self, store: "Callable[[], Store] | None", read: Callable[[Any], Mapping] = unpacked) -> None:
        """read: makes tensors of what came, by their names."""
        super().__init__()
        self._new_store, self._read = store, read
        self.problem: Rejected | None = None  # for which a reply was not taken
        self._store: Store | None = None
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}  # begin, bytes, type and shape
        self._held: Tensors = {}

    def consume_items(self, items: list, result: Any) -> Any:
        try:
            for item in items:
                self.take(self._read(item))
        except Exception as error:  # else NVFlare asks its sender for the same again and again
            self.problem = error if isinstance(error, Rejected) else Rejected("a piece of a tensor is not what it says")
            raise self.problem from error
        return {}

    def take(self, pieces: Mapping[str, Any]) -> None:
        """Take what has arrived."""
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
        """Return all of them; raises Rejected for pieces that make none."""
        content = self._store.mapped() if self._store and self._store.end else torch.empty(0, dtype=torch.uint8)
        filed = {
            key: content[begin : begin + size].view(dtype).reshape(shape)
            for key, (begin, size, dtype, shape) in self._places.items()
        }
        return in_one(self._held | filed, side_by_side if self._new_store else torch.cat)


class Fetching:
    """Note when others last fetched tensors from this process, and whether they have all."""

    def __init__(self) -> None:
        self.last, self.all = -math.inf, True

    def saw(self, ended: bool) -> None:
        """Note that somebody asked for a piece, or was told that there are no more."""
        self.last, self.all = monotonic(), ended

    def silence(self) -> float:
        """Return the seconds since."""
        return monotonic() - self.last


FETCHING = Fetching()  # a process has one job


def site_of(process: str) -> str:
    """Return the site of a job's process; before it stand the relays that it is behind."""
    return process.rpartition(".")[0].rpartition(".")[2]


class _Chunks(TensorDownloadable):
    """Tensors for NVFlare to fetch in numbered pieces: small ones together, large ones cut."""

    def __init__(self, tensors: Tensors, most: int) -> None:
        parts = in_pieces(tensors, most)
        super().__init__(parts, most)
        self.tensors: Tensors | None = parts
        self.pieces: list[list[str]] = []  # the names of the parts in each
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
        FETCHING.all = True  # the word that there are no more may have been asked for before a piece
        super().release()


AHEAD = 1.0  # seconds of a line's own speed, as measured, for which pieces are asked for ahead
MOST_AHEAD = 32  # of the same tensors
MOST_TOGETHER = 8  # in one reply


@dataclass
class _OnTheirWay:
    """Pieces of the same tensors that were asked for ahead."""

    # By its first piece, what a reply will be, and how many come with it
    coming: dict[int, tuple[Future[Message], int]] = field(default_factory=dict)
    next: int = 1  # the first that was not asked for yet
    came: int = 0
    there: int | None = None  # how many there are, when all have come
    since: float = field(default_factory=monotonic)
    ended: bool = False

    def room(self) -> int:
        """Return how many more the line has room for, by its speed so far."""
        return min(MOST_AHEAD, 1 + math.ceil(AHEAD * self.came / max(monotonic() - self.since, 0.001)))

    def next_ones(self, after: int, there: int) -> Iterator[tuple[int, int]]:
        """Yield what to ask for now, as the first piece of a reply and how many come with it: a quick line carries
        several in one, as each reply costs both ends the same work.

        after: what follows the pieces that have come. there: how many there are
        """
        self.next = max(self.next, after)
        while self.next < min(there, after + self.room()):
            together = min(max(1, self.room() * MOST_TOGETHER // MOST_AHEAD), there - self.next)
            yield self.next, together
            self.next += together


ON_THEIR_WAY: dict[str, _OnTheirWay] = {}  # by NVFlare's name for the tensors that are being fetched


class ChunkedTensors(TensorDecomposer):
    """NVFlare's way of sending tensors, with a largest piece."""

    store: "ClassVar[Callable[[], Store] | None]" = None  # of large tensors that arrive in this process; else memory

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
    """Return an error of the line, or what has come; raises Rejected for what can't be read."""
    download_object(consumer=arriving, **kwargs)
    if (problem := arriving.problem) is not None:
        raise Rejected(f"its answer was not taken: {problem}", problem.private)
    return (arriving.error, {}) if arriving.error else ("", arriving.whole())


class PlainTensors(TensorDecomposer):
    """NVFlare's way of sending tensors, which a training script's process knows."""

    def download(self, *, fobs_ctx: Any = None, **kwargs: Any) -> tuple[str, dict]:
        return fetched(ArrivingTensors(None, load), **kwargs)


class PlainArrays(NumpyArrayDecomposer):
    """NVFlare's way of sending numpy's arrays, which takes none that are compressed."""

    def download(self, *, fobs_ctx: Any = None, **kwargs: Any) -> tuple[str, dict]:
        return fetched(ArrivingTensors(None, arrays_of), **kwargs)

    def native_recompose(self, data: bytes, manager: Any = None) -> np.ndarray:
        return read_array(BytesIO(data))


PASSING = (ReturnCode.TIMEOUT, ReturnCode.COMM_ERROR, ReturnCode.TARGET_UNREACHABLE)  # a line that is back heals them
PAUSE = 1.0  # seconds until a request is made again that could not be sent
SOONEST = 2.0  # seconds until a piece counts as late, however fast the line
UNKNOWN = 10.0  # the same, of a line on which nothing has come yet


class Pace:
    """The time of a piece on a line, smoothed as TCP does (RFC 6298), and what is due.

    Replies come about in the order of their requests. So a late one is lost when one has come that was asked for well
    after it. When nothing comes at all, whoever waits for the first pings until the line is back.
    """

    def __init__(self) -> None:
        self.smooth, self.varies = 0.0, 0.0  # seconds; 0: nothing has come yet
        self.due: list[_Wanted] = []  # in the order in which they were first asked for
        self.last = -math.inf  # when something came
        self.came = -math.inf  # of all that came, when the last was asked for

    def late(self) -> float:
        """Return the seconds after which a piece is late."""
        return max(SOONEST, self.smooth + 4 * self.varies) if self.smooth else UNKNOWN

    def on_reply(self, asked: float) -> None:
        """Note that a reply has come. asked: when it was asked for"""
        self.came, self.last = max(self.came, asked), monotonic()

    def took(self, seconds: float) -> None:
        """Note how long a piece took."""
        self.smooth, self.varies = self.smooth or seconds, self.varies or seconds / 2
        self.varies += (abs(seconds - self.smooth) - self.varies) / 4
        self.smooth += (seconds - self.smooth) / 8


@dataclass(eq=False)
class _Wanted:
    """A piece that somebody waits for, or several in one reply."""

    transfer: _OnTheirWay
    line: Pace
    patience: Timeouts
    cell: Cell
    send: Callable[..., Message]
    request: dict[str, Any]
    pieces: int  # in the reply
    begun: float = field(default_factory=monotonic)
    asked: float = 0.0

    def come(self) -> Message:
        """Ask for it until it has come, or nothing more is worth waiting for."""
        again = False
        while True:
            self.asked = monotonic()
            given = {"timeout": min(self.line.late(), self.patience.again), "progress_wait_cb": self._may_come}
            reply = self.send(**self.request | given)
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
            if code not in PASSING:
                self.line.on_reply(self.asked)
                self.transfer.came += self.pieces
                if not again:  # else nobody knows which request this answers
                    self.line.took(monotonic() - self.asked)
                return reply
            end_reply(self.request["request"])
            self.transfer.came, self.transfer.since = 0, monotonic()  # its speed is measured again
            if self._is_over():
                return make_reply(ReturnCode.SERVICE_UNAVAILABLE, error=f"silent for {self.patience.silence:g} s")
            again |= code == ReturnCode.TIMEOUT
            sleep(max(0.0, self.asked + PAUSE - monotonic()))

    def _is_over(self) -> bool:
        aborted = self.request.get("abort_signal")
        ended = self.transfer.ended or has_stopped(self.cell) or bool(aborted and aborted.triggered)
        return ended or monotonic() - self.begun > self.patience.silence

    def _may_come(self) -> bool:
        """Return whether it is still on its way, as far as one knows, when it is late."""
        before = self._received()
        if self._is_silent():
            while self._is_silent() and not self._is_over():
                self._look()
            sleep(PAUSE)  # what is on its way comes in the moment after
        lost = self.line.came > self.asked + AHEAD and self._received() == before
        return not lost and not self._is_over()

    def _received(self) -> int:
        return received(self.cell, self.request["request"])

    def _is_silent(self) -> bool:
        return monotonic() - max(self.line.last, self.asked) > self.line.late()

    def _look(self) -> None:
        """Look whether the line is back, by a ping of the first of those that wait."""
        asked = monotonic()
        if self.line.due[0] is self:
            reply = self.send(**self.request | {"request": ping(), "timeout": SOONEST})
            if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK:
                return self.line.on_reply(asked)
        sleep(max(0.0, asked + PAUSE / 4 - monotonic()))


class RetryingRequests:
    """The requests of one of a job's processes, made again as long as the plan grants."""

    def __init__(self, cell: Cell, patience: Timeouts) -> None:
        self.patience, self.cell, self.send = patience, cell, send_requests_by(cell, self.request)
        reply_once(cell, f"{OBJ_DOWNLOADER_CHANNEL}:{OBJ_DOWNLOADER_TOPIC}")
        self.fetchers = ThreadPoolExecutor(256, "pieces")  # nearly all that one does is wait
        self.lines: defaultdict[str, Pace] = defaultdict(Pace)  # by who has the tensors
        self.informed = set[str]()  # senders that know that all has come; for one that does not, the next waits

    def end_fetchers(self) -> None:
        """End the threads that fetched until now, of which NVFlare warns at a job's end; others fetch what is late."""
        ended, self.fetchers = self.fetchers, ThreadPoolExecutor(256, "pieces")
        ended.shutdown(wait=False)

    def request(self, *given: Any, **asked: Any) -> Message:
        """Send a request and return the reply, in the place of NVFlare's cell."""
        if asked.get("channel") == OBJ_DOWNLOADER_CHANNEL:
            return self._fetch(**asked)
        if asked.get("topic") == ServerCommandNames.GET_TASK:
            asked["timeout"] = 2 * self.patience.again
        if asked.get("topic") == ServerCommandNames.SUBMIT_UPDATE:
            asked |= {"timeout": self.patience.again, "progress_wait_cb": self._is_being_fetched}
        return self.send(*given, **asked)

    def _fetch(self, request: Message, **asked: Any) -> Message:
        """Return a piece, and ask for those after it."""
        piece = AskedPiece(request)
        own = ON_THEIR_WAY.get(piece.tensors)
        if own is None:  # not in pieces of ours
            return self._patiently(_OnTheirWay(), request=request, **asked)
        coming, together = own.coming.pop(piece.number, (None, 1))
        source = str(asked["target"])
        if not coming and piece.number == own.there and source not in self.informed:
            self.informed.add(source)
            Thread(target=self._tell_end, args=(piece, request), kwargs=asked, daemon=True).start()
            return no_more()
        if piece.number == 0:  # how many there are nobody knows yet
            self._ask_ahead(own, piece, 1, 2, asked)
        reply = coming.result() if coming else self._patiently(own, request=request, **asked)
        after, there = piece.number + together, pieces_in(reply)
        own.there = there if after >= there > 0 else None
        self._ask_ahead(own, piece, after, there, asked)
        return reply

    def _tell_end(self, piece: AskedPiece, request: Message, **asked: Any) -> None:
        """Tell the sender that all pieces have come; the receiver does not wait. Only then it drops them, as it could
        not send one again."""
        try:
            with suppress(RuntimeError):  # the cell has stopped
                piece.confirm(self.cell, self._patiently(_OnTheirWay(), request=request, **asked), asked["target"])
        finally:
            self.informed.discard(str(asked["target"]))

    def _ask_ahead(self, own: _OnTheirWay, piece: AskedPiece, after: int, there: int, asked: dict[str, Any]) -> None:
        """Ask for as many of the next pieces as the line has room for."""
        for number, together in own.next_ones(after, there):
            asking = {**asked, "request": piece.other(number, together)}
            own.coming[number] = self.fetchers.submit(self._patiently, own, together, **asking), together

    def _patiently(self, own: _OnTheirWay, pieces: int = 1, **asked: Any) -> Message:
        """Ask for pieces until they are there, or their owner was silent for too long."""
        line = self.lines[str(asked.get("target"))]
        wanted = _Wanted(own, line, self.patience, self.cell, self.send, asked, pieces)
        line.due.append(wanted)
        try:
            return wanted.come()
        finally:
            line.due.remove(wanted)

    def _is_being_fetched(self) -> bool:
        """Return whether an answer is still worth waiting for that the server was told to fetch."""
        return FETCHING.silence() < (2 * self.patience.again if FETCHING.all else self.patience.silence)
