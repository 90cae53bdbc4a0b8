"""For each patch of nvflare_reliability/patches.py: NVFlare behaves as the patch says, without it.

A test that fails here says that NVFlare no longer needs the patch, so that it can go.
"""

import inspect
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import nvflare
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.client.cell.api import CellClientAPI
from nvflare.fuel.f3.cellnet.cell import Adapter, Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell, TargetMessage
from nvflare.fuel.f3.cellnet.credential_manager import CredentialManager
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import StatsPoolManager
from nvflare.fuel.f3.streaming import byte_receiver
from nvflare.fuel.f3.streaming.blob_streamer import BlobStream
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import STREAM_RETRY_WAIT, TxTask
from nvflare.fuel.f3.streaming.download_service import Consumer, _download_object, download_object
from nvflare.fuel.f3.streaming.stream_const import StreamDataType, StreamHeaderKey
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.dots import TENSOR_DOWNLOAD
from nvflare.lighter.utils import load_private_key_file
from nvflare.private.fed.app.simulator import simulator_runner
from nvflare.private.fed.server import job_runner
from nvflare.private.fed.server.fed_server import FederatedServer

from medsilo.flare.wire import let_tensors_travel
from medsilo.runs.messages import StudyMessage
from nvflare_reliability import compatibility, kit_patches, patches
from nvflare_reliability.chunking import ChunkedTensors, RetryingRequests
from nvflare_reliability.compatibility import UPSTREAM
from nvflare_reliability.patches import Replies, hold_less
from nvflare_reliability.timeouts import Timeouts
from tests.conftest import over_all
from tests.federation.test_gate import NUMBERS, Cells, answer_of, cells, piece  # noqa: F401 (cells is a fixture)
from tests.federation.test_transport import Server, ask, echo, server  # noqa: F401 (server is a fixture)
from tests.secure.consortium import wait_until

# Patches whose need is shown where they are tested; that of one with a file, by an NVFlare with it.
ELSEWHERE = {
    "GarbageBudget": "federation/test_gate.py test_what_nvflare_leaves_behind_of_messages_does_not_pile_up",
    "close_lost_connections": "federation/test_lines.py test_connections_that_were_lost_keep_no_handle_beyond_a_job",
    "AnswerReader": "federation/test_gate.py test_without_the_gate_such_an_answer_ends_the_process",
    "connect": "secure/test_lead.py test_a_connection_that_comes_too_late_is_given_up",
}


PATCHED = sorted(path.stem for path in UPSTREAM.glob("*.patch"))
against = pytest.mark.skipif(version("nvflare") != "2.9.0", reason="the patches are against NVFlare 2.9.0")
SITE_PACKAGES = Path(str(nvflare.__file__)).parents[1]


def test_every_patch_has_an_issue_and_a_test(root: Path) -> None:
    here = {name.removeprefix("test_need_of_") for name in globals() if name.startswith("test_need_of_")}
    assert compatibility.PLACES.keys() == here | ELSEWHERE.keys() | {*PATCHED} and not here & ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        file, test = place.split()
        assert f"def {test}(" in (root / "tests" / file).read_text("utf-8")
    texts = {path.stem: path.read_text("utf-8") for path in UPSTREAM.glob("*.md")}
    assert texts.keys() == compatibility.PLACES.keys()
    for name, text in texts.items():
        assert text.startswith("# ") and "\nPlease " in text and ("No patch: " in text) == (name not in PATCHED), name


def applied(patch: str, folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    """Apply the patch of a part to the NVFlare in a folder."""
    command = ["patch", "-p1", "-d", str(folder), "-i", str(UPSTREAM / f"{patch}.patch"), *how]
    return subprocess.run(command, capture_output=True, text=True)


@against
def test_each_patch_file_applies_to_nvflare_s_own_source() -> None:
    def check(patch: str) -> None:
        done = applied(patch, SITE_PACKAGES, "--dry-run", "--fuzz=0")
        assert done.returncode == 0 and "offset" not in done.stdout, done.stdout

    over_all(PATCHED, check)
    assert len(PATCHED) >= 15


@pytest.mark.slow
def test_a_part_says_once_that_nvflare_is_another(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing where all is as it was tested, whose versions the list has."""
    known = json.loads(compatibility.KNOWN.read_text("utf-8"))
    places = {place for own in compatibility.PLACES.values() for place in own}
    assert known.keys() == places and all(own[version("nvflare")] for own in known.values())

    # NVFlare may have set up logging in a test before.
    for name, value in {"disabled": False, "propagate": False, "handlers": [caplog.handler]}.items():
        monkeypatch.setattr(compatibility.LOG, name, value)
    caplog.set_level("WARNING", compatibility.LOG.name)

    def lines() -> list[str]:
        caplog.clear()
        compatibility.say_if_changed.cache_clear()
        for _ in range(2):
            hold_less(cell)
        return [record.getMessage() for record in caplog.records if record.name == compatibility.LOG.name]

    assert lines() == []
    monkeypatch.setattr(TxTask, "__init__", lambda self, *given, **more: None)
    (line,) = lines()
    assert "hold_less" in line and "TxTask.__init__" in line and "upstream/hold_less.md" in line
    monkeypatch.delattr(TxTask, "stop")
    monkeypatch.setattr(compatibility, "PLACES", {"hold_less": (f"{TxTask.__module__}:TxTask.stop",)})
    assert len(lines()) == 1


def test_need_of_RollingFile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_patches, "AUDIT", 2000)
    monkeypatch.setattr(kit_patches, "AUDITS", 3)
    AuditService.initialize(str(tmp_path / "audit.log"))
    try:
        for number in range(30):
            AuditService.add_event("somebody", f"command-{number}", msg="100 % of it")
        assert (tmp_path / "audit.log").stat().st_size > 2000 and len([*tmp_path.iterdir()]) == 1
        kit_patches.bound_audit()
        kit_patches.bound_audit()
        for number in range(30, 100):
            AuditService.add_event("somebody", f"command-{number}")
    finally:
        AuditService.close()
    logs = [tmp_path / name for name in ("audit.log.3", "audit.log.2", "audit.log.1", "audit.log")]
    assert sorted(tmp_path.iterdir()) == sorted(logs) and all(log.stat().st_size <= 2000 for log in logs)
    lines = "".join(log.read_text() for log in logs).splitlines()
    said = [int(line.partition("[A:command-")[2].partition("]")[0]) for line in lines]
    assert said == list(range(said[0], 100)) and len(said) > 50


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's logging, which another test may have set up, hides no line."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "disabled", False)
            monkeypatch.setattr(logger, "propagate", True)


@pytest.fixture
def cell() -> Iterator[Cell]:
    yield Cell("medsilo-patches", "tcp://127.0.0.1:1", secure=False, credentials={})
    CoreCell.ALL_CELLS.pop("medsilo-patches", None)
    for name in [name for name in StatsPoolManager.pools if name.endswith("@medsilo-patches")]:
        del StatsPoolManager.pools[name]


@pytest.mark.slow
def test_need_of_hold_less(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards a message has a small buffer, and one that only quick lines carry goes in few frames."""
    made: list[int] = []
    monkeypatch.setattr(TxTask, "start_task_thread", lambda self, _: made.append(len(self.buffer)))

    def buffer_of(size: int) -> int:
        cell.byte_streamer.send("c", "t", "x", {}, BlobStream(bytes(size), {}))
        return made.pop()

    assert buffer_of(10) == 1 << 20
    hold_less(cell)
    assert buffer_of(10) == buffer_of(1 << 20) == patches.BUFFER
    assert buffer_of(3 << 20) == 3 << 20 and buffer_of(20 << 20) == patches.LONGEST_FRAME


def test_need_of_StreamLimits(cell: Cell) -> None:
    """Its sender says how long a finished stream is kept, by a thread; what comes before its turn is held."""
    keys, place = StreamHeaderKey, {MessageHeaderKey.ORIGIN: "hospital-a.patches"}
    wishes = {keys.RELIABLE: True, keys.RETRY_TIMEOUT: 3500.0, keys.RETRY_WAIT: 5.0}
    wide = {keys.CHUNK_SIZE: 1, keys.WINDOW_SIZE: 10**6}

    def comes(stream: int, sequence: int, kind: int, content: bytes, more: dict) -> RxTask:
        headers = {**place, keys.STREAM_ID: stream, keys.SEQUENCE: sequence, keys.DATA_TYPE: kind, **more}
        message = Message(headers, content)
        task = RxTask.find_or_create_task(message, cell.core_cell)
        task.process_chunk(message)
        return task

    kept = comes(1, 0, StreamDataType.FINAL, b"x", wishes)
    wait_until(lambda: kept.completed or bool(kept.chunks), 5, "the end of the stream")
    assert kept.completed_task_ttl == 3505.0
    for sequence in range(1, 101):
        hoarded = comes(2, sequence, StreamDataType.CHUNK, b"x" * 100_000, wide)
    assert not hoarded.failed and sum(len(part) for _, part in hoarded.out_seq_chunks.values()) == 10_000_000
    for task in (kept, hoarded):
        task.stop(ValueError("ended"), notify=False)
        task._remove_task()
    assert "Timer" in inspect.getsource(byte_receiver.RxTask)


@pytest.mark.slow
def test_need_of_Replies(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """An answer whose tensors are refused by ending their stream is not heard of before its time limit."""
    refused: list[tuple] = []

    def only_end(self: Replies, stream: Any, reason: str) -> int:
        refused.append((self, stream, reason))
        patches.end_stream(stream, reason)
        return 0

    own = Replies.refuse
    monkeypatch.setattr(Replies, "refuse", only_end)
    before = len(cells.got)
    cells.send(answer_of(StudyMessage({"model": {"w": torch.zeros(25_000_000)}})), timeout=1.0)
    wait_until(lambda: bool(refused), 10, "the refusal of a piece")
    time.sleep(1.0)
    assert len(cells.got) == before
    monkeypatch.undo()
    own(*refused[-1])
    wait_until(lambda: len(cells.got) > before, 10, "the refusal of the answer")


def test_need_of_send_requests_by(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fetched(Consumer):
        why = ""

        def consume(self, ref_id: str, state: dict, data: Any) -> dict:
            return {}

        def download_completed(self, ref_id: str) -> None: ...

        def download_failed(self, ref_id: str, reason: str) -> None:
            self.why = reason

    asked: list[str] = []
    line = [ReturnCode.COMM_ERROR, ReturnCode.COMM_ERROR, ReturnCode.INVALID_REQUEST]

    def over_a_line(**given: Any) -> Message:
        asked.append(given["channel"])
        return make_reply(line[len(asked) - 1])

    cell.send_request = over_a_line
    fetched = Fetched()
    download_object("hospital-a", "ref", 1.0, cell, fetched)
    assert len(asked) == 1 and fetched.why
    asked.clear()
    monkeypatch.setattr("nvflare_reliability.chunking.PAUSE", 0.01)
    RetryingRequests(cell, Timeouts(silence=5.0))
    download_object("hospital-a", "ref", 1.0, cell, Fetched())
    assert len(asked) == 3


def test_need_of_reply_once(cell: Cell) -> None:
    """NVFlare asks for it in every reply, and sends what is not acknowledged again after five seconds."""
    assert "reliable=True" in inspect.getsource(Adapter._send_response) and STREAM_RETRY_WAIT == 5.0
    sent: list[dict] = []
    cell.send_blob = lambda *given, **asked: sent.append(asked)
    patches.reply_once(cell, "pieces:get")
    cell.send_blob(CellChannel.RETURN_ONLY, "pieces:get", "x", Message(), reliable=True)
    cell.send_blob(CellChannel.RETURN_ONLY, "task:get", "x", Message(), reliable=True)
    assert [asked["reliable"] for asked in sent] == [False, True]


@pytest.mark.slow
def test_need_of_end_reply(cells: Cells) -> None:  # noqa: F811
    """A request that timed out leaves what has begun to come of its reply."""
    request = Message({}, b"")
    sent = cells.site.core_cell.fire_and_forget

    def begins(channel: str, topic: str, targets: str, message: Message, **how: Any) -> dict:
        begun = piece(77, 0, StreamDataType.CHUNK, 12, b"the first", STREAM_REQ_ID=request_id())
        begun.add_headers({MessageHeaderKey.ORIGIN: targets, StreamHeaderKey.CHANNEL: CellChannel.RETURN_ONLY})
        cells.site.byte_receiver._data_handler(begun)
        return {}

    def request_id() -> str:
        return request.get_header(StreamHeaderKey.STREAM_REQ_ID)

    def task() -> RxTask:
        return next(task for task in RxTask.rx_task_map.values() if task.sid == 77)

    cells.site.core_cell.fire_and_forget = begins
    try:
        reply = cells.site.send_request(
            channel=CellChannel.SERVER_COMMAND, target=cells.job.get_fqcn(), topic="t", request=request, timeout=0.3
        )
    finally:
        cells.site.core_cell.fire_and_forget = sent
    assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.TIMEOUT and not task().failed
    patches.end_reply(Message({StreamHeaderKey.STREAM_REQ_ID: "another"}, b""))
    assert not task().failed
    patches.end_reply(request)
    assert task().failed


def test_need_of_AskedPiece() -> None:
    """tests/federation/test_lines.py measures what this costs on a long line."""
    source = inspect.getsource(_download_object)
    assert source.count("download_request_thread_pool.submit(") == 1 and "reply = pending_future.result()" in source


def test_need_of_before_script_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare's `init` returns when the cell takes messages already."""
    source, seen = inspect.getsource(CellClientAPI.init), list[str]()
    assert source.index("_register_control_cbs(self._cell)") < source.index("self._cell.start()")
    monkeypatch.setattr(CellClientAPI, "_register_control_cbs", lambda api, cell: seen.append(f"NVFlare {cell}"))
    kit_patches.before_script_connects.cache_clear()
    begin = seen.append
    for _ in range(2):  # a script that calls `init` again
        kit_patches.before_script_connects(begin)
    CellClientAPI._register_control_cbs(None, "cell")
    assert seen == ["cell", "NVFlare cell"]
    kit_patches.before_script_connects.cache_clear()


def test_need_of_send_tensors_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is sent too early would empty all that this process ever sends."""
    known = {name: own for name, own in fobs.fobs._decomposers.items() if name != "torch.Tensor"}
    monkeypatch.setattr(fobs.fobs, "_decomposers", known)
    monkeypatch.setattr(fobs.fobs, "_dot_handlers", {})
    sent = torch.arange(3.0)
    for _ in range(2):
        assert fobs.loads(fobs.dumps(sent)).shape == (0,)
        fobs.register(ChunkedTensors)
    let_tensors_travel()
    assert torch.equal(fobs.loads(fobs.dumps(sent)), sent)
    assert isinstance(fobs.get_dot_handler(TENSOR_DOWNLOAD), ChunkedTensors)


def test_need_of_sign_when_ready() -> None:
    """NVFlare keeps the signature that it made without a key, and every answer with it is dropped."""

    def new_server() -> FederatedServer:
        new = FederatedServer.__new__(FederatedServer)
        new.my_own_auth_client_name, new.my_own_token, new.my_own_token_signature = "server", "token", None
        new._get_id_asserter, new.logger = lambda: key, logging.getLogger("server")
        return new

    def signs(own: FederatedServer) -> str:
        own._add_auth_headers(message := Message())
        return str(message.get_header(CellMessageAuthHeaderKey.TOKEN_SIGNATURE))

    key, early, late = None, new_server(), new_server()
    assert signs(early) == kit_patches.UNSIGNED
    for own in (early, late):
        kit_patches.sign_when_ready(SimpleNamespace(get_engine=lambda own=own: SimpleNamespace(server=own)))
    assert signs(early) == signs(late) == kit_patches.UNSIGNED
    assert late.sign_auth_token("hospital-a", "token") == kit_patches.UNSIGNED  # as ever
    key, stock = SimpleNamespace(sign=lambda text, return_str: f"{text} signed"), new_server()
    stock.my_own_token_signature = kit_patches.UNSIGNED
    assert signs(early) == signs(late) == "servertoken signed" != signs(stock)


def test_need_of_ask_quietly(cells: Cells, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    def errors() -> int:
        """Of a command to a job whose process has not connected."""
        caplog.clear()
        where = {"channel": CellChannel.SERVER_COMMAND, "topic": "app_command", "target": "server.to-come"}
        reply = cells.server.send_request(**where, request=Message({}, {}), timeout=2.0)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        return len([words for words in told if "to-come" in words])  # others' streams end meanwhile

    def errors_over_the_gone() -> int:
        """Of what a person asks a hospital that is gone, as `medsilo status` does."""
        caplog.clear()
        gone = TargetMessage("to-come", CellChannel.CLIENT_MAIN, "admin", new_cell_message({}, "status"))
        replies = cells.server.broadcast_multi_requests({"to-come": gone}, 2.0, optional=False)
        assert replies["to-come"].get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK
        return len([one for one in caplog.records if one.levelname == "ERROR" and "to-come" in one.getMessage()])

    assert errors() > 0 and errors_over_the_gone() > 0
    kit_patches.ask_quietly(cells.server, "app_command", "admin")
    assert errors() == 0 and errors_over_the_gone() == 0


def test_need_of_start_again() -> None:
    """A job's process is started at a hospital when the job is, and at no other time; its tokens are learned once."""
    starts = re.compile(r"(?<!def )start_client_job\(")
    files = [*Path(str(job_runner.__file__)).parent.rglob("*.py")]
    assert [path.name for path in files for _ in starts.findall(path.read_text("utf-8"))] == ["job_runner.py"]
    assert "engine.start_client_job(" in inspect.getsource(job_runner.JobRunner._start_run)


def test_need_of_wait_no_more(tmp_path: Path) -> None:
    """Only a client's own word, and its removal after minutes without a heartbeat, end the waiting for it."""
    runner = job_runner.JobRunner(str(tmp_path))
    runner._pending_client_outcomes["job"] = {"hospital-a"}
    assert runner.client_outcome_wait_timeout == 900.0
    assert "is_cell_connected" not in inspect.getsource(job_runner)
    context = FLContext()
    engine = SimpleNamespace(job_runner=runner)
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    assert not kit_patches.wait_no_more(context, "job", {"hospital-a"}) and not runner._pending_client_outcomes["job"]


def test_need_of_patient_simulator() -> None:
    """tests/faults/test_simulator_faults.py has another program take the port."""
    task = inspect.getsource(simulator_runner.SimulatorClientRunner.do_one_task)
    assert task.index("get_open_ports(1)[0]") < task.lower().index("popen") < task.index("_create_connection(")
    assert "timeout" not in str(inspect.signature(simulator_runner.SimulatorRunner))


def test_a_connection_is_closed_when_a_command_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python waits at its end for a thread that reads from it."""
    (tmp_path / "startup").mkdir()
    closed = list[Session]()
    monkeypatch.setattr(Session, "__init__", lambda own, **_: setattr(own, "api", SimpleNamespace(scheme="tcp")))
    monkeypatch.setattr(Session, "close", lambda own: closed.append(own))
    monkeypatch.setattr(kit_patches, "_only_tcp", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        kit_patches.connect("lead", tmp_path, 1.0)
    assert len(closed) == 1


def test_a_connection_reads_a_key_once(tmp_path: Path) -> None:
    """NVFlare has two functions that read it. A second key is read too, and so is the same key after the connection."""
    keys = []
    for name in ("a", "b"):
        pem = rsa.generate_private_key(65537, 2048).private_bytes(
            Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
        )
        (tmp_path / name).write_bytes(pem)
        keys.append(pem)
    manager = object.__new__(CredentialManager)
    manager.local_key = keys[0]
    with kit_patches._each_key_once():
        first = load_private_key_file(tmp_path / "a")
        assert manager.get_local_key() is first
        other = load_private_key_file(tmp_path / "b")
    assert other.private_numbers() != first.private_numbers()
    assert load_private_key_file(tmp_path / "a") is not first


def test_need_of_sites_started_by(tmp_path: Path) -> None:
    """The simulator starts a site's process itself; with the patch, other programs of this process start as ever."""

    class Asked(Exception):
        """The process of a site is asked for."""

    assert "start" not in str(inspect.signature(simulator_runner.SimulatorRunner))
    given = SimpleNamespace(workspace=str(tmp_path), log_config="log_config.json", set="")
    cell = SimpleNamespace(get_root_url_for_child=lambda: "tcp://a", get_internal_listener_url=lambda: "tcp://b")
    client = SimpleNamespace(client_name="hospital-a", token="token", cell=cell)
    runner = simulator_runner.SimulatorClientRunner("", given, [client], None, None, {})
    for folder in ("startup", "local"):
        (tmp_path / "hospital-a" / folder).mkdir(parents=True)
    asked: list[list[str]] = []

    def start(command: list[str], **more: Any) -> None:
        asked.append(command)
        raise Asked

    own = subprocess.Popen
    with kit_patches.sites_started_by(start):
        with pytest.raises(Asked):
            runner.do_one_task(client, 1, None, None)
        assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
        assert isinstance(subprocess.Popen([sys.executable, "-c", ""]), own)
    assert asked[0][asked[0].index("--client") + 1] == "hospital-a" and subprocess.Popen is own
