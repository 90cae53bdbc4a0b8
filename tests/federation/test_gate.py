"""Test the gate that checks messages between NVFlare's real cells: a server, a job of the server, and a hospital that
sends arbitrary messages.
"""

import contextlib
import errno
import gc
import io
import itertools
import json
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey, FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import numpy_decomposers
from nvflare.app_common.np.np_downloader import ArrayDownloadable
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import StatsPoolManager
from nvflare.fuel.f3.streaming import blob_streamer
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamDataType,
    StreamHeaderKey,
)
from nvflare.fuel.f3.streaming.stream_types import StreamError, StreamFuture
from nvflare.fuel.f3.streaming.stream_utils import CheckedExecutor
from nvflare.fuel.utils.fobs import lobs

from medsilo.core.errors import Refused
from medsilo.core.mmap_store import Spill
from medsilo.core.parent_watch import forget_most, most_held
from medsilo.exchange.bounds import SLACK, Bounds, answer_bounds, request_bounds
from medsilo.flare import script_process
from medsilo.flare.script_wire import as_model
from medsilo.flare.wire import META, TASK, _ArrivalFile, let_tensors_travel, refuse, to_parcel, to_shareable
from medsilo.plan import parse_plan
from medsilo.runs.messages import StudyMessage
from medsilo_lab.script_plan import plan_of_script
from nvflare_reliability import patches
from nvflare_reliability.answer_gate import DEEPEST, MOST_FAILED, AnswerGate, check_body, check_outline, is_unread
from nvflare_reliability.chunking import ChunkedTensors, _Chunks
from nvflare_reliability.cleanup import MOST as SERVERS_MOST
from nvflare_reliability.cleanup import BoundedStreams
from nvflare_reliability.errors import Rejected
from nvflare_reliability.liveness import Liveness
from nvflare_reliability.message_limits import MOST_OPEN, Gate
from nvflare_reliability.patches import BUFFER, GARBAGE, MOST_KEPT, MOST_LEFT, MOST_STREAMS, StreamLimits
from tests.conftest import make_plan
from tests.secure.consortium import free_port, wait_until
from tests.secure.relay import Line, Relay
from tests.unit.medsilo_server.test_coordinator import SMALL as FEW
from tests.unit.medsilo_server.test_coordinator import Answers, Study

flare_decomposers.register()
numpy_decomposers.register()
SERVER, JOB, SITE = "server", "server.job", "hospital-a.job"
SMALL = StudyMessage({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, {"task": "round", "samples": 3, "loss": 0.5})


class Cells:
    def __init__(self, line: Line | None = None) -> None:
        let_tensors_travel(to_files=True)
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        self.relay = Relay(port, line)
        self.server = Cell(SERVER, url, secure=False, credentials={}, create_internal_listener=True)
        self.server.core_cell.start()
        inner = self.server.core_cell.get_internal_listener_url()
        self.job = Cell(JOB, url, secure=False, credentials={}, parent_url=inner)
        own = url if line is None else f"tcp://127.0.0.1:{self.relay.port}"
        self.site = Cell("hospital-a" if line else SITE, own, secure=False, credentials={})
        if line:  # without a connection, NVFlare passes messages within the process
            CoreCell.ALL_CELLS.clear()
        self.job.core_cell.start()
        self.site.core_cell.start()
        wait_until(lambda: line is None or self.relay.down.passed > 0, 600, "the hospital's connection")
        self.got: list[Shareable] = []
        self.job.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic="*", cb=self._commanded)
        self.commands: list[str] = []
        self.gate = AnswerGate(self.job, Bounds(), TASK, refuse)
        self.gate.guard_server()

    def _commanded(self, request: Message) -> Message:
        self.commands.append(request.get_header(MessageHeaderKey.TOPIC))
        self.got.append(request.payload)
        return make_reply(CellCode.OK)

    def send(
        self, payload: Any, topic: str = "submit_update", headers: dict | None = None, timeout: float = 30.0
    ) -> str:
        reply = self.site.send_request(
            channel=CellChannel.SERVER_COMMAND,
            target=JOB,
            topic=topic,
            request=new_cell_message(headers or {}, payload),
            timeout=timeout,
        )
        return reply.get_header(MessageHeaderKey.RETURN_CODE)

    def throw(self, message: Message, to: str = JOB) -> None:
        self.site.core_cell.fire_and_forget(STREAM_CHANNEL, STREAM_DATA_TOPIC, to, message)

    def refused(self, payload: Any, **how: Any) -> str:
        before = len(self.got)
        self.send(payload, **how)
        wait_until(lambda: len(self.got) > before, 600, "the answer")
        answer = self.got[-1]
        assert len(self.got) == before + 1 and is_unread(answer)
        assert answer.get_peer_context().get_identity_name() == "hospital-a"
        with pytest.raises(Refused) as caught:
            to_parcel(answer)
        return str(caught.value)

    def takes(self) -> bool:
        before = len(self.got)
        assert self.send(answer_of(SMALL)) == CellCode.OK and len(self.got) == before + 1
        message = to_parcel(self.got[-1])
        return torch.equal(message.groups["model"]["w"], SMALL.groups["model"]["w"]) and message.facts == SMALL.facts

    def stop(self) -> None:
        self.relay.cut()
        let_tensors_travel()
        for cell in (self.site, self.job, self.server):
            cell.core_cell.stop()
            CoreCell.ALL_CELLS.pop(cell.get_fqcn(), None)
        # if NVFlare's pool of statistics were not emptied, this process could not create a second set of cells
        StatsPoolManager.pools.clear()


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    cells = Cells()
    yield cells
    cells.stop()


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    called: list[int] = []
    monkeypatch.setattr(os, "_exit", called.append)
    return called


def answer_of(message: StudyMessage) -> Shareable:
    return with_context(to_shareable(message))


def with_context(answer: Shareable) -> Shareable:
    context = FLContext()
    context.set_prop(FLContextKey.CURRENT_RUN, "job", private=False, sticky=False)
    context.set_prop(ReservedKey.IDENTITY_NAME, "hospital-a", private=False, sticky=False)
    answer.set_peer_context(context)
    return answer


def packed(answer: Any) -> bytes:
    return lobs.dump_to_bytes(answer)


NUMBERS = itertools.count(1_000_000)
FOBS = {StreamHeaderKey.PAYLOAD_ENCODING: "fobs"}


def section(marker: int, content: bytes, dot: int = 0) -> bytes:
    return lobs.HEADER_STRUCT.pack(marker, dot, len(content)) + content


def test_an_honest_answer_passes_as_it_was_sent(cells: Cells, no_exit: list[int]) -> None:
    assert cells.takes() and no_exit == []


def test_no_answer_is_spelt_out_for_a_line_that_nobody_logs(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    spelt: list[str] = []
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **how: spelt.append("out") or "")
    assert cells.takes() and not spelt


def test_answers_do_not_wait_for_the_threads_that_they_are_read_in(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare has 64 threads for incoming messages; in an earlier version, 65 simultaneous answers blocked all further
    messages.
    """
    monkeypatch.setattr(blob_streamer, "callback_thread_pool", CheckedExecutor(1, "the only one"))
    assert (
        cells.send(answer_of(StudyMessage({"model": {"w": torch.randn(700, 1024)}}, {"task": "round"}))) == CellCode.OK
    )


def test_a_large_answer_lies_in_a_file_and_is_refused_where_the_disk_is_full(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stores answers on disk, because many answers would fill the memory."""
    made: list[Spill] = []
    monkeypatch.setattr(ChunkedTensors, "store", lambda: made.append(_ArrivalFile()) or made[-1])
    large = StudyMessage({"model": {"w": torch.randn(700, 1024), "b": torch.ones(3)}}, {"task": "round"})
    before = len(cells.got)
    assert cells.send(answer_of(large)) == CellCode.OK
    came = to_parcel(cells.got[before]).groups["model"]
    assert made[0].end == large.groups["model"]["w"].nbytes
    assert all(torch.equal(came[name], tensor) for name, tensor in large.groups["model"].items())

    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ChunkedTensors, "store", _ArrivalFile)
    monkeypatch.setattr("medsilo.core.mmap_store.Spill._write", full)
    assert "(No space left on device)" in cells.refused(answer_of(large))
    assert cells.takes()


@pytest.mark.parametrize(
    "items",
    [["text"], [["w", "F32", [2**40], b"1234"]], [["w", "F32", [1], b"1234"], {}], [["w|0|-1", "F32", [1], b"1234"]]],
    ids=["a text", "a false shape", "a mapping", "a piece of nothing"],
)
def test_a_liar_about_pieces_is_refused_and_the_next_answer_is_taken(
    items: list[Any], cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as lying:
        lying.setattr(
            _Chunks,
            "produce",
            lambda self, state, who: (
                (ProduceRC.EOF, None, {}) if state else (ProduceRC.OK, items, {"next": 1, "pieces": 1})
            ),
        )
        answer = answer_of(StudyMessage({"model": {"w": torch.randn(700, 1024)}}, {"task": "round"}))
        assert "its tensors came in pieces" in (why := cells.refused(answer)) or "not what it says" in why
    assert cells.takes()


@pytest.mark.parametrize("inline", [True, False])
def test_arrays_that_a_site_compressed_are_not_unpacked(
    inline: bool, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an earlier version, 2 MB became 11 GB at the server, because NVFlare's filters can turn tensors into
    compressed arrays.
    """
    small, file = np.arange(6, dtype=np.float32), io.BytesIO()
    meta = {META: {"facts": {}, "dtypes": {"model": {"w": "torch.float32"}}}}
    answer = with_context(DXO(DataKind.WEIGHTS, {"model/w": small}, meta).to_shareable())

    def sent() -> dict[str, Any]:
        return {"payload": packed(answer), "headers": FOBS} if inline else {"payload": answer}

    cells.send(**sent())
    assert to_parcel(cells.got[-1]).groups["model"]["w"].tolist() == small.tolist()
    np.savez_compressed(file, T0=np.zeros(64 << 20, np.uint8))
    monkeypatch.setattr(ArrayDownloadable, "produce_item", lambda self, index: file.getvalue())
    monkeypatch.setattr(
        numpy_decomposers.NumpyArrayDecomposer, "native_decompose", lambda self, *given: file.getvalue()
    )
    tracemalloc.start()
    try:
        assert ("can't be read" if inline else "is not what it says") in cells.refused(**sent())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert cells.takes()


def test_what_can_not_be_read_of_a_scripts_tensors_is_refused_at_once(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare itself fetches a script's tensors; in an earlier version, NVFlare repeated the same request to the sender
    forever.
    """
    # NVFlare cannot send tensors in the memory format channels_last
    turned = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    large = StudyMessage({"model": {"w": torch.randn(700, 1024), "turned": turned}}, {"task": "round"})
    let_tensors_travel(to_files=True, plainly=True)
    try:
        assert cells.send(with_context(as_model(large))) == CellCode.OK
        came = to_parcel(cells.got[-1]).groups["model"]
        assert all(torch.equal(came[name], own) for name, own in large.groups["model"].items())
        monkeypatch.setattr(TensorDownloadable, "produce_item", lambda self, index: b"no tensor")
        assert "a piece of a tensor is not what it says" in cells.refused(with_context(as_model(large)))
    finally:
        let_tensors_travel(to_files=True)
    assert cells.takes()


def test_a_surplus_tensor_is_not_fetched(cells: Cells, no_exit: list[int]) -> None:
    surplus = StudyMessage({"model": {"w": torch.ones(2, 3), "more": torch.zeros(100_000_000 // 4)}}, SMALL.facts)
    forget_most()
    before, started = most_held(), time.monotonic()
    text = cells.refused(answer_of(surplus), timeout=30)
    assert text.startswith("its message of 8.4 MB or more")
    assert cells.gate.taken["hospital-a.job"] <= SLACK
    assert time.monotonic() - started < 25
    assert most_held() - before < 250e6
    assert cells.takes() and no_exit == []


@pytest.mark.parametrize("heals", [False, True])
def test_a_producer_that_answers_with_errors_is_not_asked_for_good(
    heals: bool, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an earlier version, the sender repeated its error until the server's timeout."""
    asked, before, produce = list[str](), len(cells.got), _Chunks.produce

    def fails(self: _Chunks, state: dict, who: str) -> tuple[str, Any, dict]:
        asked.append(who)
        return produce(self, state, who) if heals and len(asked) > 3 else (ProduceRC.ERROR, None, {})

    monkeypatch.setattr(_Chunks, "produce", fails)
    answer, tried = answer_of(StudyMessage({"model": {"w": torch.randn(700, 1024)}}, {"task": "round"})), 0
    while len(cells.got) == before and tried < 3 * MOST_FAILED:
        cells.send(answer, timeout=2.0)
        tried += 1
    assert is_unread(cells.got[-1]) != heals and not cells.gate.failed
    if not heals:
        with pytest.raises(Refused, match=f"could not be fetched, {MOST_FAILED} times"):
            to_parcel(cells.got[-1])
    monkeypatch.undo()
    assert cells.takes()


def test_many_tensors_count_together(cells: Cells) -> None:
    surplus = {f"more {number}": torch.zeros(500_000) for number in range(12)}
    assert "not taken: at most 8.4 MB" in cells.refused(answer_of(StudyMessage({"model": surplus})))
    allowed = {name: surplus[name] for name in list(surplus)[:3]}
    cells.send(answer_of(StudyMessage({"model": allowed})))
    assert to_parcel(cells.got[-1]).groups["model"].keys() == allowed.keys()


def test_pieces_of_a_process_count_for_the_answer_that_they_belong_to(cells: Cells) -> None:
    """In an earlier version, one limit on the number of pieces held for all rounds together."""
    assert "".join(cells.gate._of_job(f"{SITE}.client_api_trainer_1")) == SITE


def test_pieces_that_did_not_arrive_do_not_count(cells: Cells) -> None:
    """After a broken connection, the server fetches the missing pieces again."""
    future = StreamFuture(1)
    cells.gate.taken["x"] = 10
    cells.gate._give_back(future, "x", 6)
    assert cells.gate.taken["x"] == 10
    future.set_exception(StreamError("cut"))
    cells.gate._give_back(future, "x", 6)
    assert cells.gate.taken.pop("x") == 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (StudyMessage(facts={"x": "x" * 30_000_000}), "its message of 30.0 MB was not taken"),
        (StudyMessage(facts={"x": [1] * 100_000}), "more than 20000 values"),
        (StudyMessage(facts={"x": {str(key): {} for key in range(30_000)}}), "more than 20000 values"),
    ],
    ids=["a text of 30 MB", "many numbers", "many mappings"],
)
def test_what_else_is_large_is_refused_too(cells: Cells, answer: StudyMessage, words: str) -> None:
    assert words in cells.refused(answer_of(answer))
    assert cells.takes()


def test_tensors_sent_inline_are_bounded(cells: Cells) -> None:
    """No setting of the server stops a sender from putting tensors into the message body, so the gate limits the body's
    size.
    """
    inline = packed(answer_of(StudyMessage({"model": {"w": torch.zeros(5_000_000)}})))
    assert "was not taken: at most 8.4 MB" in cells.refused(inline, headers=FOBS)
    small = packed(answer_of(SMALL))
    cells.send(small, headers=FOBS)
    assert to_parcel(cells.got[-1]).facts == SMALL.facts


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


WHOLE = packed(with_context(Shareable()))
REFERENCE = b'{"fqcn": "server.job", "ref_id": "x"}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00garbage", "cut short"),
        (random.Random(0).randbytes(5_000), "its answer"),
        (WHOLE[:-7], "cut short"),
        (section(lobs.MARKER_MAIN, b""), "cut short"),
        (section(lobs.MARKER_DATUM_BLOB, b"x"), "does not begin with a body"),
        (section(lobs.MARKER_MAIN, nested(5_000)), f"nested more than {DEEPEST} deep"),
        (section(lobs.MARKER_MAIN, b"\xdf\xff\xff\xff\xff"), "more than 20000 values"),
        (section(lobs.MARKER_MAIN, b"\xc1"), "holds what is no value"),
        (section(lobs.MARKER_MAIN, b"\xc0\xc0"), "its body is not one value"),
        (section(lobs.MARKER_MAIN, msgpack.packb({"x": 1})), "not one of NVFlare's"),
        (
            section(lobs.MARKER_MAIN, msgpack.packb({"__fobs_type__": "os.system", "__fobs_data__": "x"})),
            "can't be read (ValueError)",
        ),
        (WHOLE + section(lobs.MARKER_DATUM_FILE, b"x" * 20), "neither text nor bytes"),
        (WHOLE + section(lobs.MARKER_DATUM_TEXT, b"x" * 16 + REFERENCE, 6), "data that are not its own"),
        (WHOLE + section(lobs.MARKER_DATUM_TEXT, b"x" * 16 + b"[" * 9_000, 6), "data that are not its own"),
        (WHOLE + section(lobs.MARKER_DATUM_TEXT, b"x" * 16 + REFERENCE, 2), "in a way that is not allowed"),
        (packed(Shareable()), "does not say whose it is"),
        (packed([1, 2]), "not one of NVFlare's"),
    ],
)
def test_what_cannot_be_read_costs_its_sender_that_answer(
    cells: Cells, no_exit: list[int], content: bytes, words: str
) -> None:
    assert words in cells.refused(content, headers=FOBS)
    assert cells.takes() and no_exit == []


@pytest.mark.parametrize(
    ("holder", "fits"),
    [
        (SITE, True),
        (f"{SITE}.client_api_trainer_1", True),
        (f"{SITE}-2", False),
        ("hospital-a", False),
        ([SITE], False),
    ],
)
def test_tensors_are_fetched_from_the_sites_own_processes_alone(holder: Any, fits: bool) -> None:
    """If a training script runs in a separate process, the server fetches the tensors from that process. In an earlier
    version, the server rejected the tensors of a separate process.
    """
    place = json.dumps({"fqcn": holder, "ref_id": "x"}).encode()
    answer = WHOLE + section(lobs.MARKER_DATUM_TEXT, b"x" * 16 + place, 6)
    with contextlib.nullcontext() if fits else pytest.raises(Rejected, match="not its own"):
        check_outline([answer], Bounds(), SITE)


def test_an_answer_packed_in_another_way_is_refused(cells: Cells) -> None:
    assert "packed in another way" in cells.refused(b"some bytes")


def piece(stream: int, sequence: int, kind: int, size: Any, sent: bytes, **more: Any) -> Message:
    """Return one message of a stream that claims to be an answer; `more` contains additional headers."""
    headers = {
        **FOBS,
        StreamHeaderKey.STREAM_ID: stream,
        StreamHeaderKey.SEQUENCE: sequence,
        StreamHeaderKey.SIZE: size,
        StreamHeaderKey.DATA_TYPE: kind,
        StreamHeaderKey.CHANNEL: CellChannel.SERVER_COMMAND,
        StreamHeaderKey.TOPIC: "submit_update",
        **{getattr(StreamHeaderKey, name): value for name, value in more.items()},
    }
    return Message(headers, sent)


@pytest.mark.parametrize(
    ("announced", "sent", "words"),
    [
        (len(WHOLE), WHOLE[:-9], None),
        (len(WHOLE), WHOLE + b"more", None),
        (10**15, WHOLE, "its message of 1000000.00 GB was not taken"),
        (-1, WHOLE, None),
        ("x", WHOLE, None),
        (0, b"", "can't be read"),
    ],
    ids=["cut short", "longer than announced", "huge", "less than nothing", "no number", "empty"],
)
def test_a_stream_that_is_not_what_it_announces_ends_nothing(
    cells: Cells, no_exit: list[int], announced: Any, sent: bytes, words: str | None
) -> None:
    before = len(cells.got)
    cells.throw(piece(next(NUMBERS), 0, StreamDataType.FINAL, announced, sent))
    if words:
        wait_until(lambda: len(cells.got) > before, 600, "the refusal")
        with pytest.raises(Refused, match=words):
            to_parcel(cells.got[-1])
    else:
        time.sleep(0.2)
        assert len(cells.got) == before
    assert cells.takes() and no_exit == []


def test_who_leaves_answers_hanging_keeps_few_readers(cells: Cells, no_exit: list[int]) -> None:
    streams = [next(NUMBERS) for _ in range(3 * MOST_OPEN)]
    for stream in streams:
        cells.throw(piece(stream, 0, StreamDataType.CHUNK, 8, b"half"))
    wait_until(lambda: cells.gate.open[SITE] == MOST_OPEN, 600, "the answers that are open")
    time.sleep(0.2)
    assert cells.gate.open[SITE] == MOST_OPEN
    for stream in streams:
        cells.throw(piece(stream, 1, StreamDataType.FINAL, 8, b"half"))
    wait_until(lambda: not cells.gate.open, 600, "the end of all of them")
    assert cells.takes() and no_exit == []


def test_readers_end_with_the_study_and_late_answers_are_still_read(cells: Cells, no_exit: list[int]) -> None:
    """NVFlare logs a warning about each thread that still runs when a job's process ends."""
    assert cells.takes()
    begun = {*cells.gate.readers._threads}
    cells.gate.end_readers()
    wait_until(lambda: not begun & {*threading.enumerate()}, 600, "the end of the readers")
    assert begun and cells.takes() and no_exit == []


def test_a_server_that_can_not_tell_who_is_there_is_asked_once(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unanswered request would leave a warning in the log of an NVFlare kit."""
    presence = Liveness(cells.job, {}, sync=lambda: None, silence=420.0)
    with monkeypatch.context() as away:
        away.setattr(cells.job, "send_request", lambda **asked: make_reply(CellCode.COMM_ERROR, error="timeout"), False)
        presence.look()
    assert not presence.ended.is_set()
    presence.look()
    assert presence.ended.is_set() and not presence.away()


def finished() -> list[RxTask]:
    return [task for (origin, _), task in [*RxTask.rx_task_map.items()] if origin == SITE and task.completed]


def timers() -> int:
    return sum(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_streams_that_ended_are_not_kept_for_as_long_as_their_sender_wishes(
    cells: Cells, no_exit: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare itself would keep a thread for each finished stream for an hour."""
    wishes = {"TOPIC": "get_task", "RELIABLE": True, "RETRY_TIMEOUT": 3600.0, "RETRY_WAIT": 5.0}
    before, seen, many = len(cells.got), timers(), MOST_KEPT + 100
    for _ in range(many):
        cells.throw(piece(next(NUMBERS), 0, StreamDataType.FINAL, len(WHOLE), WHOLE, **wishes))
    wait_until(lambda: len(cells.got) == before + many, 600, "all of them")
    assert cells.takes() and no_exit == []
    assert MOST_KEPT - 10 < len(finished()) < MOST_KEPT + 10
    assert timers() <= seen + 9
    assert {task.completed_task_ttl for task in finished()} == {65.0}
    now = time.monotonic()
    monkeypatch.setattr(patches, "monotonic", lambda: now + 2.0)
    assert cells.takes() and len(finished()) > MOST_KEPT - 10
    monkeypatch.setattr(patches, "monotonic", lambda: now + 70.0)
    assert cells.takes() and len(finished()) < 10


@pytest.mark.long
@pytest.mark.parametrize("frees", [True, False])
def test_what_nvflare_leaves_behind_of_messages_does_not_pile_up(
    cells: Cells, frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare leaves a message's buffer in a reference cycle, which Python collects late."""
    if not frees:
        monkeypatch.setattr(GARBAGE, "sent", lambda size=0: None)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2 * MOST_LEFT // BUFFER // 3):
            assert cells.takes()
            cells.got.clear()
        left = [len(thing.buffer) for thing in gc.get_objects() if isinstance(thing, TxTask)]
    finally:
        gc.enable()
    # On a busy machine, the uncollected buffers stay below three times MOST_LEFT. Without the patch, the uncollected
    # buffers reach ten times MOST_LEFT.
    assert (sum(left) < 5 * MOST_LEFT) == frees
    assert BUFFER in left


def unfinished() -> set[int]:
    return {task.sid for task in [*RxTask.rx_task_map.values()] if not task.completed and not task.failed}


def test_streams_that_never_begin_are_few(cells: Cells, no_exit: list[int]) -> None:
    assert not unfinished()
    streams = [next(NUMBERS) for _ in range(3 * MOST_STREAMS)]
    for stream in streams:
        cells.throw(piece(stream, 5, StreamDataType.CHUNK, 8, b"half"))
    wait_until(lambda: unfinished() == {*streams[-MOST_STREAMS:]}, 600, "the oldest to go")
    assert cells.takes() and no_exit == []
    for stream in streams:
        cells.throw(piece(stream, 5, StreamDataType.ERROR, 8, b"", ERROR_MSG="ended"))
    wait_until(lambda: not unfinished(), 600, "the end of all of them")


def test_what_waits_for_its_turn_is_bounded_over_all_streams(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each stream, NVFlare stores up to 1024 messages that arrive out of order, whatever their size."""
    monkeypatch.setattr(cells.gate, "most", Bounds(size=200_000))
    most = MOST_OPEN * 200_000

    def waiting() -> int:
        tasks = [*RxTask.rx_task_map.values()]
        return sum(len(sent) for task in tasks for _, sent in [*task.out_seq_chunks.values()])

    held, take = (
        list[int](),
        StreamLimits.take,
    )
    monkeypatch.setattr(StreamLimits, "take", lambda *given: (take(*given), held.append(waiting()))[0])
    wide, streams = {"CHUNK_SIZE": 1, "WINDOW_SIZE": 10**6}, [next(NUMBERS) for _ in range(4)]
    for sequence, stream in itertools.product(range(1, 26), streams):
        cells.throw(piece(stream, sequence, StreamDataType.CHUNK, 8, b"x" * 50_000, **wide))
    wait_until(lambda: len(held) >= 100, 600, "all pieces")
    assert 0.9 * most < max(held) <= most


def test_the_servers_own_process_takes_little_of_each_sender(cells: Cells) -> None:
    """The server's main process has no plan that would limit the size of messages. NVFlare itself stores pieces that
    arrive out of order for an hour, without a limit on their number or size.
    """
    got: list[Message] = []
    cells.server.register_request_cb(channel="notes", topic="leave", cb=got.append)
    BoundedStreams().bound(cells.server)

    def send(sender: str, **more: Any) -> int:
        number = next(NUMBERS)
        headers = {"CHANNEL": "notes", "TOPIC": "leave", "RELIABLE": True, "RETRY_TIMEOUT": 3600.0}
        note = piece(number, *more.pop("what"), **{**headers, **more})
        note.set_header(CellMessageAuthHeaderKey.CLIENT_NAME, sender)
        cells.throw(note, SERVER)
        return number

    def kept() -> list[RxTask]:
        return [task for task in [*RxTask.rx_task_map.values()] if task.channel == "notes" and task.completed]

    seen, note = timers(), (0, StreamDataType.FINAL, len(WHOLE), WHOLE)
    for _ in range(MOST_KEPT + 100):
        send("hospital-a", what=note)
    wait_until(lambda: len(got) == MOST_KEPT + 100, 600, "all of them")
    assert MOST_KEPT - 10 < len(kept()) < MOST_KEPT + 10 and timers() <= seen + 9
    hanging = [send("hospital-a", what=(0, StreamDataType.CHUNK, 8, b"half")) for _ in range(2 * MOST_STREAMS)]
    other = send("hospital-b", what=(0, StreamDataType.CHUNK, 8, b"half"))
    wait_until(lambda: unfinished() == {*hanging[-MOST_STREAMS:], other}, 600, "the oldest of hospital-a to go")
    huge = send("hospital-b", what=(0, StreamDataType.CHUNK, SERVERS_MOST + 1, b"x"))
    wait_until(lambda: RxTask.rx_task_map[SITE, huge].failed, 600, "the end of a message that is too large")
    for number in [*hanging, other]:
        cells.throw(piece(number, 1, StreamDataType.ERROR, 8, b"", ERROR_MSG="ended"), SERVER)
    wait_until(lambda: not unfinished(), 600, "the end of all of them")
    assert cells.takes()


def test_all_cells_of_a_hospital_are_one_sender(cells: Cells) -> None:
    assert {cells.gate._sender(f"hospital-a.job{more}") for more in ("", ".1", ".2.job")} == {"hospital-a"}
    assert cells.gate._sender("relay-1.hospital-b.job") == "relay-1.hospital-b"
    assert {cells.gate._sender(other) for other in ("hospital-a", "hospital-a.1", "hospital-a.2")} == {""}


def test_without_the_gate_such_an_answer_ends_the_process(cells: Cells, no_exit: list[int]) -> None:
    found = cells.job.byte_receiver.registry
    ours = found.reg.pop(f"{CellChannel.SERVER_COMMAND}:submit_update")
    with contextlib.suppress(Exception):
        cells.send(b"garbage", headers=FOBS, timeout=1.0)
    wait_until(lambda: bool(no_exit), 600, "the end of the process")
    found.set(CellChannel.SERVER_COMMAND, "submit_update", ours)
    assert no_exit == [1]


@pytest.mark.parametrize("code", [ReturnCode.RUN_MISMATCH, ReturnCode.TASK_UNKNOWN, ReturnCode.UNSAFE_JOB])
def test_no_return_code_of_one_site_ends_the_job(cells: Cells, code: str) -> None:
    answer = answer_of(StudyMessage())
    answer.set_return_code(code)
    cells.send(answer)
    assert cells.got[-1].get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    with pytest.raises(Refused, match=f"the site answered {code}"):
        to_parcel(cells.got[-1])


@pytest.mark.parametrize("topic", ["abort", "show_stats", "app_command", "handle_dead_job", "configure_job_log"])
def test_a_site_gives_the_server_no_commands(cells: Cells, topic: str) -> None:
    before = list(cells.commands)
    with contextlib.suppress(Exception):
        cells.send(Shareable(), topic=topic, timeout=0.5)
    direct = new_cell_message({}, Shareable())
    cells.site.core_cell.send_request(CellChannel.SERVER_COMMAND, JOB, topic, direct, timeout=0.5)
    assert cells.commands == before
    assert cells.takes()


def test_a_site_that_calls_a_message_too_large_ends_nothing(cells: Cells, no_exit: list[int]) -> None:
    cells.site.core_cell.fire_and_forget(
        STREAM_CHANNEL,
        STREAM_ERROR_TOPIC,
        JOB,
        Message(
            {StreamHeaderKey.STREAM_ID: 7, StreamHeaderKey.ERROR_MSG: "x", StreamHeaderKey.ERROR_TYPE: "BlobSizeError"}
        ),
    )
    assert cells.takes() and no_exit == []


def test_a_site_takes_no_more_than_belongs_to_a_task(cells: Cells) -> None:
    """The gate also protects a site from messages of a dishonest server."""
    gate = Gate(cells.site, Bounds())
    gate.guard_site()
    large = torch.zeros(10_000_000)
    tensors: list[torch.Tensor] = [torch.ones(5), large]

    def give(request: Message) -> Message:
        return new_cell_message(
            {MessageHeaderKey.RETURN_CODE: CellCode.OK}, to_shareable(StudyMessage({"m": {"w": tensors[0]}}))
        )

    cells.job.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic="get_task", cb=give)

    def fetch() -> Message:
        ask = new_cell_message({}, Shareable())
        return cells.site.send_request(
            channel=CellChannel.SERVER_COMMAND, target=JOB, topic="get_task", request=ask, timeout=60.0
        )

    assert torch.equal(to_parcel(fetch().payload).groups["m"]["w"], torch.ones(5))
    tensors.pop(0)
    forget_most()
    before = most_held()
    with pytest.raises(RuntimeError, match="failed to download"):
        fetch()
    assert most_held() - before < 100e6
    gate.allow(Bounds(size=50_000_000))
    assert torch.equal(to_parcel(fetch().payload).groups["m"]["w"], large)


def test_a_site_of_a_script_takes_no_more_than_its_model_needs(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an earlier version, a server could send a site messages of any size, and an archive of 2 MB became 11 GB."""
    plan = plan_of_script(torch.nn.Linear(2, 3), tmp_path, {"name": "fedavg"}, rounds=1, minimum=1)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    sent: list[StudyMessage] = [SMALL, StudyMessage({"model": {"w": torch.zeros(10_000_000)}})]
    arrays, file = DXO(DataKind.WEIGHTS, {"model/w": np.ones(3, np.float32)}, {META: {}}).to_shareable(), io.BytesIO()
    np.savez_compressed(file, T0=np.zeros(64 << 20, np.uint8))
    bodies = [*map(as_model, sent), arrays]
    cells.job.register_request_cb(
        channel=CellChannel.SERVER_COMMAND,
        topic="get_task",
        cb=lambda request: new_cell_message({MessageHeaderKey.RETURN_CODE: CellCode.OK}, bodies.pop(0)),
    )

    def fetch() -> Message:
        ask = new_cell_message({}, Shareable())
        return cells.site.send_request(
            channel=CellChannel.SERVER_COMMAND, target=JOB, topic="get_task", request=ask, timeout=60.0
        )

    script_process.guard(cells.site, tmp_path / "plan.yaml")
    try:
        assert torch.equal(to_parcel(fetch().payload).groups["model"]["w"], SMALL.groups["model"]["w"])
        forget_most()
        before = most_held()
        with pytest.raises(RuntimeError, match="failed to download"):
            fetch()
        assert most_held() - before < 100e6
        monkeypatch.setattr(ArrayDownloadable, "produce_item", lambda self, index: file.getvalue())
        tracemalloc.start()
        with pytest.raises(Rejected, match="not what it says"):
            fetch()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
        script_process._gates.clear()
        let_tensors_travel(to_files=True)


def test_tensors_that_a_process_has_no_more_are_asked_for_again(cells: Cells) -> None:
    """A site's process dies while the server fetches its answer, and the new process lacks the answer's tensors."""
    assert cells.takes()
    told, tensors = ChunkedTensors().download(from_fqcn=SITE, ref_id="gone", per_request_timeout=5.0, cell=cells.job)
    assert "invalid_request" in told and tensors == {}


def test_a_site_keeps_few_finished_streams_and_no_threads_for_them(cells: Cells) -> None:
    Gate(cells.site, Bounds()).guard_site()
    seen, news = timers(), {"TOPIC": "news", "RELIABLE": True, "RETRY_TIMEOUT": 3600.0, "RETRY_WAIT": 5.0}
    got: list[Message] = []
    cells.site.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic="news", cb=got.append)

    def kept() -> set[RxTask]:
        return {task for (origin, _), task in [*RxTask.rx_task_map.items()] if origin == JOB and task.completed}

    earlier = kept()
    for _ in range(MOST_KEPT + 100):
        told = piece(next(NUMBERS), 0, StreamDataType.FINAL, len(WHOLE), WHOLE, **news)
        cells.job.core_cell.fire_and_forget(STREAM_CHANNEL, STREAM_DATA_TOPIC, SITE, told)
    wait_until(lambda: len(got) == MOST_KEPT + 100, 600, "all of them")
    assert cells.takes()
    assert MOST_KEPT - 10 < len(kept() - earlier) < MOST_KEPT + 10 and timers() <= seen


# -------------------------------------------------------------------------------------------------------- from the plan


@pytest.mark.parametrize("method", ["harmofl", "adafed", "fedsm-extra"])
def test_nothing_of_an_honest_study_is_larger_than_its_layout(method: str, tmp_path: Path) -> None:
    """Half of the allowed message size is reserved for additions by NVFlare's filters."""
    plan, seen = make_plan(method, *FEW), [0, 0]

    def script(site: str, asked: StudyMessage, work: Callable[[], StudyMessage]) -> Answers:
        reply = work()
        seen[:] = max(seen[0], asked.size()), max(seen[1], reply.size())
        return [(site, reply)]

    Study(plan, tmp_path / "run", script).run()
    allowed = [(bounds(plan).size - SLACK) // 2 for bounds in (request_bounds, answer_bounds)]
    assert seen == allowed


def test_the_pieces_of_a_scripts_large_network_are_no_more_values_than_an_answer_may_have(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an earlier version, the server rejected an answer of 2 GB if the answer consisted of a few large tensors."""
    layer = {"name": "", "tensors": [{"name": "w", "shape": [1 << 20, 1 << 10], "dtype": "float32", "learns": True}]}
    network = {"name": "script", "layers": [layer], "sha256": "0" * 64, "bytes": 1 << 33}
    task = {"name": "script", "metric": "accuracy", "input_channels": 1}
    rest = {"algorithm": {"name": "fedavg"}, "training": {"rounds": 1}, "participation": {"minimum": 2}}
    plan = parse_plan({"task": task, "network": network, **rest})
    answer = as_model(StudyMessage({"model": plan.layout()["model"].state_dict()}, {"task": "round"}))
    reference = {"type": "ref", "data": "T4095"}
    monkeypatch.setattr(ChunkedTensors, "decompose", lambda self, tensor, manager=None: reference)
    check_outline([packed(answer)], answer_bounds(plan), SITE)


def test_values_are_counted_as_msgpack_reads_them() -> None:
    for value, count in [
        (None, 1),
        (True, 1),
        (-5, 1),
        (2**40, 1),
        (-(2**40), 1),
        (0.5, 1),
        ("x" * 300, 1),
        (b"x" * 70_000, 1),
        ([1, [2, 3]], 5),
        ({"a": {"b": [None]}}, 6),
        (list(range(70_000)), 70_001),
        ({str(k): k for k in range(70_000)}, 140_001),
        (msgpack.ExtType(3, b"x" * 8), 1),
        (msgpack.ExtType(3, b"x" * 300), 1),
        (msgpack.Timestamp(2**34, 1), 1),
    ]:
        body = msgpack.packb(value)
        check_body(body, count)
        with pytest.raises(Rejected, match=f"more than {count - 1} values"):
            check_body(body, count - 1)
        for cut in range(1, len(body), max(1, len(body) // 7)):
            with pytest.raises(Rejected):
                check_body(body[:cut], 10**6)
