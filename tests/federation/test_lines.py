"""Send a large answer over unreliable connections between NVFlare's real cells; the sender does not repeat received
data.
"""

import gc
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ConfigVarName
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import ReturnCode
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from nvflare.fuel.f3.streaming.transfer_progress import STREAMING_IDLE_TIMEOUT
from nvflare.fuel.utils.fobs import lobs
from nvflare.fuel.utils.fobs.datum import Datum

from medsilo.exchange.bounds import Bounds
from medsilo.flare.job_source import CONFIG
from medsilo.flare.jobs import CLIENT, SERVER
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.wire import _ArrivalFile, to_parcel
from medsilo.runs.messages import StudyMessage
from medsilo_lab.jobs import write_job
from nvflare_reliability.chunking import (
    AHEAD,
    MOST_AHEAD,
    MOST_TOGETHER,
    SOONEST,
    UNKNOWN,
    ArrivingTensors,
    ChunkedTensors,
    Pace,
    RetryingRequests,
    _Chunks,
    _OnTheirWay,
    in_one,
    in_pieces,
    packed,
    unpacked,
)
from nvflare_reliability.cleanup import LostConnections
from nvflare_reliability.errors import Rejected
from nvflare_reliability.timeouts import PIECE, Timeouts, limits
from tests.conftest import make_plan
from tests.federation.test_gate import Cells, answer_of
from tests.secure.consortium import wait_until
from tests.secure.relay import Line
from tests.unit.medsilo_pretrained.test_pretrained import tuned_plan
from tools.tables import LIMITS

LARGE = StudyMessage({"model": {"w": torch.arange(3_000_000.0).reshape(5, -1), "b": torch.ones(3)}}, {"task": "round"})
LINE = Line(rate=4e6, delay=0.01, loss=0.005)
GRANTED = Timeouts(silence=120.0, again=4.0)
DOWN = 4.0  # seconds for which the connection is interrupted; after this time, NVFlare's own download would fail


@pytest.fixture
def cells() -> Iterator[Cells]:
    cells = Cells(LINE)
    cells.gate.allow(Bounds(size=100_000_000))
    yield cells
    cells.stop()


def send_over_a_cut(cells: Cells, down: float = DOWN) -> str:
    codes: list[str] = []
    sending = threading.Thread(target=lambda: codes.append(cells.send(answer_of(LARGE), timeout=120)))
    sending.start()
    wait_until(lambda: cells.relay.up.passed > 0.8 * LARGE.size(), 600, "the first pieces")
    cells.relay.cut()
    sending.join(down)
    cells.relay.mend()
    sending.join(300)
    return codes[0]


def open_handles() -> int:
    """Wait until this process's number of open file handles has been constant for one second, and return the number."""
    last, since = psutil.Process().num_fds(), time.monotonic()
    while time.monotonic() < since + 1:
        time.sleep(0.05)
        if (now := psutil.Process().num_fds()) != last:
            last, since = now, time.monotonic()
    return last


@pytest.mark.slow
def test_connections_that_were_lost_keep_no_handle_beyond_a_job(cells: Cells) -> None:
    """NVFlare leaves the sockets of lost connections open, in reference cycles."""
    gc.collect()
    gc.disable()
    try:
        before = open_handles()
        for _ in range(2):
            cells.relay.cut()
            passed = cells.relay.down.passed
            cells.relay.mend()
            wait_until(lambda passed=passed: cells.relay.down.passed > passed, 600, "the connection")
        assert open_handles() == before + 2
        LostConnections().handle_event(EventType.JOB_COMPLETED, FLContext())
        assert open_handles() == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_round_of_a_part_is_its_bytes_and_one_in_a_hundred_more_at_most() -> None:
    """The test counts all bytes of a hospital's connection, including headers and acknowledgements."""
    cells = Cells(Line())
    cells.gate.allow(Bounds(size=100_000_000))
    vit = {"name": "vit", "size": 32, "patch": 8, "width": 768, "depth": 1}
    plan = tuned_plan(of=vit, network={"train": ["blocks.*.attn.out_proj.weight", "head"]})
    trained = plan.build_networks()["model"].state_dict()
    size = sum(own.nbytes for own in trained.values())
    before = cells.relay.up.passed
    answer = answer_of(StudyMessage({"model": trained}, {"task": "round", "samples": 40, "loss": 0.5}))
    assert cells.send(answer, timeout=60) == ReturnCode.OK
    came = to_parcel(cells.got[-1]).groups["model"]
    changed = {name: came[name].shape for name, own in trained.items() if not torch.equal(own, came[name])}
    assert not changed and size > 2_000_000
    assert 1 < (cells.relay.up.passed - before) / size < 1.01
    cells.stop()


@pytest.mark.slow
def test_threads_that_fetch_end_with_the_study_and_late_tensors_still_come(cells: Cells) -> None:
    """NVFlare logs a warning about each thread that still runs when a job's process ends."""
    requests = RetryingRequests(cells.job, GRANTED)
    assert cells.send(answer_of(LARGE), timeout=60) == ReturnCode.OK
    begun = {*requests.fetchers._threads}
    requests.end_fetchers()
    wait_until(lambda: not begun & {*threading.enumerate()}, 600, "the end of the threads")
    assert begun and cells.send(answer_of(LARGE), timeout=60) == ReturnCode.OK
    came = to_parcel(cells.got[-1]).groups["model"]
    assert all(torch.equal(own, came[name]) for name, own in LARGE.groups["model"].items())


@pytest.mark.slow
def test_a_cut_costs_no_more_than_the_piece_that_it_cut(cells: Cells) -> None:
    for cell in (cells.job, cells.site):
        RetryingRequests(cell, GRANTED)
    assert send_over_a_cut(cells) == ReturnCode.OK
    sent, came = LARGE.groups["model"], to_parcel(cells.got[-1]).groups["model"]
    assert all(torch.equal(sent[name], came[name]) for name in sent)
    # if the transfer restarted, the site would send 1.8 times the size of the tensors
    assert cells.relay.up.passed < 1.5 * LARGE.size()


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["get_task", "submit_update"])
def test_a_request_that_a_cut_swallowed_is_over_at_once_and_can_be_made_again(cells: Cells, topic: str) -> None:
    """Without medsilo, NVFlare would wait for the request's timeout, five minutes in a job with a training script."""
    codes: list[str] = []

    def ask(timeout: float) -> None:
        codes.append(cells.send(Shareable(), topic, timeout=timeout))

    def lose(timeout: float) -> threading.Thread:
        asking, before = threading.Thread(target=ask, args=(timeout,)), cells.relay.up.passed
        cells.relay.hush()
        asking.start()
        wait_until(lambda: cells.site.requests_dict and cells.relay.up.passed > before, 30, "the request")
        cells.relay.cut()
        cells.relay.speak()
        wait_until(lambda: not cells.site.core_cell.agents, 30, "the end of the connection")
        cells.relay.mend()
        wait_until(lambda: bool(cells.site.core_cell.agents), 30, "the connection")
        return asking

    alone = lose(timeout=20.0)
    assert codes == [] and cells.site.requests_dict
    alone.join()
    assert codes == [ReturnCode.TIMEOUT]
    RetryingRequests(cells.site, timeouts_of(make_plan("fedavg", "participation.timeout=600")), sees_fetching=False)
    lose(timeout=300.0).join(5.0)
    assert codes[1:] == [ReturnCode.COMM_ERROR] and not cells.commands
    ask(timeout=300.0)
    assert codes[2:] == [ReturnCode.OK] and cells.commands == [topic] and not cells.site.requests_dict


def test_a_request_for_work_is_over_soon_if_another_connection_lost_it(cells: Cells) -> None:
    """The connection between relay and server breaks; the site does not notice, because the connection between site and
    relay stays open.
    """
    RetryingRequests(cells.site, Timeouts(silence=120.0, again=1.0), sees_fetching=False)
    cells.relay.hush()
    began = time.monotonic()
    assert cells.send(Shareable(), "get_task", timeout=300.0) == ReturnCode.TIMEOUT
    assert time.monotonic() - began < 60


def test_when_a_piece_is_late_follows_from_what_its_line_does() -> None:
    lines = {seconds: Pace() for seconds in (0.1, 5.0)}
    assert {line.late() for line in lines.values()} == {UNKNOWN}
    for seconds, line in lines.items():
        for _ in range(40):
            line.took(seconds)
    assert lines[0.1].late() == SOONEST and 5 < lines[5.0].late() < 5.1
    for seconds in (3.0, 7.0) * 20:
        lines[5.0].took(seconds)
    assert 10 < lines[5.0].late() < 16  # the time limit is four standard deviations above the mean time
    for _ in range(40):
        lines[5.0].took(0.1)
    assert lines[5.0].late() < 2.5


@pytest.mark.long
@pytest.mark.parametrize("closes", [False, pytest.param(True, marks=pytest.mark.long)], ids=["silent", "closed"])
def test_what_a_cut_swallowed_is_asked_for_again_within_seconds(cells: Cells, closes: bool) -> None:
    """With NVFlare's defaults, the site noticed a broken connection after up to a minute.

    A broken connection loses only pieces in transit.
    """
    patience = timeouts_of(make_plan("fedavg", "participation.timeout=600"))
    for cell in (cells.job, cells.site):
        RetryingRequests(cell, patience)
    relay, large = cells.relay, StudyMessage({"model": {"w": torch.randn(6_000_000)}}, {"task": "round"})
    codes: list[str] = []
    sending = threading.Thread(target=lambda: codes.append(cells.send(answer_of(large), timeout=60)))
    began, before = time.monotonic(), relay.up.passed
    sending.start()
    wait_until(lambda: relay.up.passed - before > 0.6 * large.size(), 600, "more than half")
    relay.cut() if closes else relay.hush()
    sending.join(DOWN)
    relay.mend() if closes else relay.speak()
    sending.join(120)
    seconds, sent = time.monotonic() - began - DOWN, relay.up.passed - before
    assert codes == [ReturnCode.OK]
    assert torch.equal(to_parcel(cells.got[-1]).groups["model"]["w"], large.groups["model"]["w"])
    assert patience.again == 30 and seconds < large.size() / LINE.rate + 15, seconds
    on_their_way = (1 + math.ceil(AHEAD * LINE.rate / PIECE)) * PIECE if closes else 0
    assert sent < 1.02 * (large.size() + on_their_way), sent / large.size()


@pytest.mark.long
def test_a_slow_line_is_not_asked_twice(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes six seconds in the test; NVFlare itself would repeat a reply after five seconds."""
    large = StudyMessage({"model": {"w": torch.randn(100_000)}}, {"task": "round"})
    monkeypatch.setattr(ChunkedTensors, "to_downloadable", lambda self, items, *rest: _Chunks(items, 200_000))
    for cell in (cells.job, cells.site):
        RetryingRequests(cell, timeouts_of(make_plan("fedavg", "participation.timeout=600")))
    for way in (cells.relay.up, cells.relay.down):
        way.line = Line(rate=33_000, delay=0.1)
    before = cells.relay.up.passed
    assert cells.send(answer_of(large), timeout=60) == ReturnCode.OK
    assert torch.equal(to_parcel(cells.got[-1]).groups["model"]["w"], large.groups["model"]["w"])
    assert 1 < (cells.relay.up.passed - before) / large.size() < 1.02


@pytest.mark.long
def test_a_fast_line_from_far_away_never_stands_idle(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a delay of 200 ms in each direction, sending 36 pieces one after the other would take 14 s."""
    line, sent = Line(rate=8e6, delay=0.2), {"w": torch.arange(1_800_000.0)}
    for way in (cells.relay.up, cells.relay.down):
        way.line = line
    monkeypatch.setattr(ChunkedTensors, "to_downloadable", lambda self, items, *rest: _Chunks(items, 200_000))
    seconds = []
    for patient in (False, True):
        for cell in (cells.job, cells.site) if patient else ():
            RetryingRequests(cell, GRANTED)
        began = time.monotonic()
        assert cells.send(answer_of(StudyMessage({"model": sent}, {"task": "round"})), timeout=60) == ReturnCode.OK
        seconds.append(time.monotonic() - began)
        assert torch.equal(to_parcel(cells.got[-1]).groups["model"]["w"], sent["w"])
    alone, ahead = seconds
    assert alone > 14 and ahead < alone / 3, seconds


@pytest.mark.long
@pytest.mark.parametrize("pieces, ways", [pytest.param(1, 4, marks=pytest.mark.long), (3, 6)])
def test_an_answer_makes_few_turns(cells: Cells, monkeypatch: pytest.MonkeyPatch, pieces: int, ways: int) -> None:
    """The connection has a delay of one second in each direction. An answer needs round trips for its request, its
    pieces and its receipt.

    The receiver requests the end message after receiving all pieces.
    """
    produced, asked, dropped = _Chunks.produce, list[float](), list[str | None]()

    def produce(self: _Chunks, state: dict, requester: str) -> Any:
        asked.append(time.monotonic())
        return produced(self, state, requester)

    monkeypatch.setattr(_Chunks, "produce", produce)
    monkeypatch.setattr(_Chunks, "transaction_done", lambda self, transaction, status: dropped.append(status))
    for way in (cells.relay.up, cells.relay.down):
        way.line = Line(delay=1.0)
    monkeypatch.setattr(ChunkedTensors, "to_downloadable", lambda self, items, *rest: _Chunks(items, 40_000))
    for cell in (cells.job, cells.site):
        RetryingRequests(cell, timeouts_of(make_plan("fedavg", "participation.timeout=600")))
    few, began = StudyMessage({"model": {"w": torch.randn(10_000 * pieces)}}, {"task": "round"}), time.monotonic()
    assert cells.send(answer_of(few), timeout=60) == ReturnCode.OK
    assert ways < time.monotonic() - began < ways + 1
    wait_until(lambda: bool(dropped), 600, "the sender to know")
    assert len(asked) == pieces + 1 and (pieces == 1 or asked[-1] - asked[-2] > 1.9)
    assert torch.equal(to_parcel(cells.got[-1]).groups["model"]["w"], few.groups["model"]["w"])


@pytest.mark.slow
def test_a_site_that_never_says_that_there_are_no_more_costs_one_thread(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's next answer waits until the site has confirmed the end of the previous answer."""
    produced, says = _Chunks.produce, threading.Event()

    def produce(self: _Chunks, state: dict, requester: str) -> Any:
        found = produced(self, state, requester)
        assert found[0] == ProduceRC.OK or says.wait(60)
        return found

    monkeypatch.setattr(_Chunks, "produce", produce)
    monkeypatch.setattr(ChunkedTensors, "to_downloadable", lambda self, items, *rest: _Chunks(items, 40_000))
    for cell in (cells.job, cells.site):
        RetryingRequests(cell, GRANTED)
    few = StudyMessage({"model": {"w": torch.randn(30_000)}}, {"task": "round"})
    assert cells.send(answer_of(few), timeout=60) == ReturnCode.OK
    codes: list[str] = []
    next_one = threading.Thread(target=lambda: codes.append(cells.send(answer_of(few), timeout=60)))
    next_one.start()
    next_one.join(3.0)
    assert codes == []
    says.set()
    next_one.join(60)
    assert codes == [ReturnCode.OK] and len(cells.got) == 2


@pytest.mark.slow
def test_a_quick_line_carries_several_pieces_in_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reply costs processor time at both ends of the connection; in an earlier version, replies took half the time
    of a large round.
    """
    given: list[int] = []
    produced = _Chunks.produce

    def produce(self: _Chunks, state: dict, requester: str) -> Any:
        found = produced(self, state, requester)
        given.append(len(found[1] or ()))
        return found

    monkeypatch.setattr(_Chunks, "produce", produce)
    monkeypatch.setattr(ChunkedTensors, "to_downloadable", lambda self, items, *rest: _Chunks(items, 20_000))
    cells = Cells(Line())
    try:
        cells.gate.allow(Bounds(size=100_000_000))
        for cell in (cells.job, cells.site):
            RetryingRequests(cell, GRANTED)
        assert cells.send(answer_of(LARGE), timeout=60) == ReturnCode.OK
        sent, came = LARGE.groups["model"], to_parcel(cells.got[-1]).groups["model"]
        assert all(torch.equal(sent[name], came[name]) for name in sent)
    finally:
        cells.stop()
    assert sum(given) >= 600 and max(given) == MOST_TOGETHER and len(given) < 300, (len(given), max(given))


def test_nobody_makes_another_ask_or_send_without_end() -> None:
    pieces = _Chunks({"w": torch.arange(1000.0)}, 40)
    for together, most in ((10**9, MOST_TOGETHER), (0, 1), (-3, 1)):
        code, items, state = pieces.produce({"next": 7, "together": together}, "")
        assert code == ProduceRC.OK and len(items) == most and state == {"next": 7 + most, "pieces": 100}
    own = _OnTheirWay(came=10**6)
    assert sum(together for _, together in own.next_ones(10**12, 10**15)) < 2 * MOST_AHEAD
    assert [*own.next_ones(3, 10)] == []


@pytest.mark.slow
def test_a_cut_longer_than_the_plan_grants_costs_the_answer(cells: Cells) -> None:
    for cell in (cells.job, cells.site):
        RetryingRequests(cell, Timeouts(silence=3.0, again=2.0))
    assert send_over_a_cut(cells, down=9.0) != ReturnCode.OK
    assert cells.got == []


def test_pieces_make_the_tensors_that_they_came_from() -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "small": torch.arange(4),
        "exact": torch.arange(32, dtype=torch.int16).reshape(2, 4, 4),
        "odd": torch.randn(7, 9).bfloat16(),
        "flags": torch.randn(5, 41) > 0,
        "empty": torch.zeros(0, 5),
    }
    pieces = in_pieces(tensors, 32)
    assert len(pieces) > 15 and max(piece.nbytes for piece in pieces.values()) <= 32
    pieces = {
        key: own for name, piece in pieces.items() for key, own in unpacked(over_the_wire(packed(name, piece))).items()
    }
    for whole in (arrived(pieces, to_files=False), arrived(pieces), arrived(dict(reversed(pieces.items())))):
        assert whole.keys() == tensors.keys()
        assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())
        assert all(whole[name].dtype == tensor.dtype for name, tensor in tensors.items())


def over_the_wire(piece: list[Any]) -> Any:
    return lobs.load_from_bytes(lobs.dump_to_bytes(piece))


def test_a_large_piece_is_sent_from_where_it_lies() -> None:
    """Six hospitals get the same tensors; copying the tensors for each hospital would cost more than all other work of
    the round.
    """
    tensor = torch.randn(20_000, 2).T
    lying, turned = packed("w", tensor.T), packed("w", tensor)
    assert np.shares_memory(np.asarray(lying[-1].value), tensor.numpy())
    assert torch.equal(unpacked(over_the_wire(lying))["w"], tensor.T)
    assert torch.equal(unpacked(over_the_wire(turned))["w"], tensor)


@pytest.mark.parametrize(
    "false",
    [
        None,
        b"w",
        ["w", "F32", [1]],
        [3, "F32", [1], b"1234"],
        ["w", "F31", [1], b"1234"],
        ["w", ["F32"], [1], b"1234"],
        ["w", "F32", [2], b"1234"],
        ["w", "F32", [-1], b"1234"],
        ["w", "F32", [2**62, 2**62, 0, -1], b""],
        ["w", "F32", [2**62, 4], b""],
        ["w", "F32", "1", b"1234"],
        ["w", "F32", 1, b"1234"],
        ["w", "F32", [1], b"123"],
        ["w", "F32", [1], "1234"],
        ["w", "F32", [1], [1, 2, 3, 4]],
        ["w", "F32", [1], Datum.text_datum("1234")],
        ["w", "F32", [1.0], b"1234"],
    ],
)
def test_what_is_no_piece_is_refused(false: Any) -> None:
    arriving = ArrivingTensors(None)
    arriving.consume_items([["w", "F32", [1], b"1234"]], None)
    assert arriving.whole()["w"].shape == (1,) and arriving.problem is None
    with pytest.raises(Rejected, match="a piece of.*what it says"):
        arriving.consume_items([over_the_wire(false)], None)
    assert arriving.problem


def test_what_arrived_in_pieces_is_not_copied() -> None:
    tensors = {"one": torch.randn(40, 30), "odd": torch.randn(7).bfloat16(), "two": torch.arange(999)}
    arriving = ArrivingTensors(_ArrivalFile)
    arriving.take(in_pieces(tensors, 100))
    whole = arriving.whole()
    places = {whole[name].untyped_storage().data_ptr() for name in ("one", "two")}
    assert len(places) == 1 and whole["odd"].untyped_storage().data_ptr() not in places
    del arriving
    whole["one"] += 1
    assert torch.equal(whole["one"], tensors["one"] + 1) and torch.equal(whole["two"], tensors["two"])


def arrived(pieces: dict, to_files: bool = True) -> dict:
    arriving = ArrivingTensors(_ArrivalFile if to_files else None)
    for key, piece in pieces.items():
        arriving.take({key: piece})
    return arriving.whole()


@pytest.mark.parametrize(
    "false",
    [
        {"w|0|2,3": torch.ones(5)},
        {"w|0|2,3": torch.ones(3), "w|2|2,3": torch.ones(3)},
        {"w|0|6": torch.ones(6), "w": torch.ones(6)},
        {"w|0|": torch.ones(6)},
        {"w|0|-1": torch.ones(6)},
        {"w|0|2,-1": torch.ones(6)},
        {"w|0": torch.ones(1)},
        {"w|0|2": torch.ones(1), "w|1|2": "text"},
        {"w|0|2|2": torch.ones(0), "w|1|2|2": torch.ones(0)},
    ],
)
def test_pieces_that_make_no_tensor_are_refused(false: dict) -> None:
    ways = (in_one, arrived) if all(isinstance(piece, torch.Tensor) for piece in false.values()) else (in_one,)
    for put_together in ways:
        with pytest.raises(Rejected, match="its tensors came.*not fit together"):
            put_together(false)


def test_the_limits_of_a_job_follow_from_its_plan(tmp_path: Path) -> None:
    plan = make_plan("fedavg", "participation.timeout=600")
    assert plan.hash == plan.with_changes(["participation.heartbeat_timeout=420", "transport.slowest=4000"]).hash
    write_job(tmp_path / "job", plan)
    patient = plan.with_changes(
        ["participation.timeout=9000", "participation.heartbeat_timeout=3600", "transport.slowest=64"]
    )
    write_job(tmp_path / "patient", patient, tmp_path / "job")
    for name, side in ((SERVER, "server"), (CLIENT, "site")):
        for job, of in (("job", plan), ("patient", patient)):
            written = json.loads((tmp_path / job / CONFIG / name).read_text())
            assert limits(timeouts_of(of), side).items() <= written.items()
    assert limits(timeouts_of(plan), "site") == {
        "tensor_download_chunk_size": 1 << 20,
        "streaming_idle_timeout": 2400.0,
        "max_runner_sync_timeout": 1200.0,
    }
    assert limits(timeouts_of(patient), "server") == {
        "tensor_download_chunk_size": 80_000,
        "streaming_idle_timeout": 7200.0,
        "dead_client_grace_period": 3600.0,
    }
    assert timeouts_of(make_plan("fedavg", "participation.timeout=60")).silence == 60


def test_the_defaults_bear_ten_minutes() -> None:
    patience = timeouts_of(make_plan("fedavg", "participation.timeout=600"))
    waits = {key: ours(patience) for key, (_, ours, _) in LIMITS.items() if "size" not in key}
    again = {"tensor_streaming_per_request_timeout", "get_task_timeout"}
    assert again < waits.keys()
    assert all(seconds > 600 for key, seconds in waits.items() if key not in again)


def test_limits_have_the_names_by_which_nvflare_asks_for_them() -> None:
    of_tensors = ChunkedTensors()._config_var_name
    known = {value for name, value in vars(ConfigVarName).items() if name.isupper()}
    known |= {
        of_tensors(name) for name in (ConfigVarName.DOWNLOAD_CHUNK_SIZE, ConfigVarName.STREAMING_PER_REQUEST_TIMEOUT)
    }
    assert LIMITS.keys() <= known | {STREAMING_IDLE_TIMEOUT}
