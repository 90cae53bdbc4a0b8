"""For each patch of nvflare_reliability/patches.py, show how NVFlare behaves without the patch.

If a test fails, a newer NVFlare makes the test's patch unnecessary.
"""

import inspect
import json
import logging
import os
import re
import shutil
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
from nvflare.apis.fl_constant import ReturnCode as NVFlaresCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.executors.client_api import external_process_backend
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
from tests.secure.consortium import free_port, wait_until

# Patches whose purpose is shown by tests in other files.
ELSEWHERE = {
    "GarbageBudget": "federation/test_gate.py test_what_nvflare_leaves_behind_of_messages_does_not_pile_up",
    "close_lost_connections": "federation/test_lines.py test_connections_that_were_lost_keep_no_handle_beyond_a_job",
    "wait_for_deployment": "federation/test_deployments.py test_a_refusal_after_twelve_seconds_reaches_the_lead",
    "LostWaits": "federation/test_lines.py test_a_request_that_a_cut_swallowed_is_over_at_once_and_can_be_made_again",
    "AnswerReader": "federation/test_gate.py test_without_the_gate_such_an_answer_ends_the_process",
    "hear_of_aborts": "secure/test_resume.py test_a_study_that_waits_to_go_on_can_be_cancelled",
    "hear_of_expulsion": "secure/test_moving.py test_a_hospital_that_is_expelled_is_out_of_the_running_study_at_once",
    "beat_when_connected": "secure/test_resume.py test_hospitals_are_back_at_once_when_their_killed_server_is",
    "tell_with_heartbeats": "secure/test_lost_key.py test_a_kit_that_somebody_copied_is_of_no_use_to_anybody",
    "say_why": "secure/test_renewing.py test_a_class_that_a_hospital_does_not_allow_is_a_refusal_with_its_reason",
    "keep_aborted": "secure/test_resume.py test_a_job_that_is_cancelled_while_it_starts_does_not_run",
    "connect_in_time": "federation/test_handshakes.py test_a_command_gives_up_on_a_server_that_does_not_shake_hands",
    "shake_hands_apart": "federation/test_handshakes.py test_nvflare_alone_lets_one_silent_connection_keep_all_out",
    "connect": "secure/test_lead.py test_a_connection_that_comes_too_late_is_given_up",
}


PATCHED = sorted(path.stem for path in UPSTREAM.glob("*.patch"))
against = pytest.mark.skipif(version("nvflare") != "2.9.0", reason="the patches are against NVFlare 2.9.0")
SITE_PACKAGES = Path(str(nvflare.__file__)).parents[1]
ROOT = Path(__file__).parents[2]


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
    command = ["patch", "-p1", "-d", str(folder), "-i", str(UPSTREAM / f"{patch}.patch"), *how]
    return subprocess.run(command, capture_output=True, text=True)


@against
@over_all("patch", PATCHED)
def test_each_patch_file_applies_to_nvflare_s_own_source(patch: str) -> None:
    done = applied(patch, SITE_PACKAGES, "--dry-run", "--fuzz=0")
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout
    assert len(PATCHED) >= 15


MAILS = sorted(path.stem for path in UPSTREAM.glob("*.mbox"))
LINE = re.compile(r"^[+-](?!\+\+ |-- ).*", re.MULTILINE)


@against
@over_all("mail", MAILS)
def test_each_mail_makes_its_patch_of_nvflare_and_brings_a_test(mail: str) -> None:
    text = (UPSTREAM / f"{mail}.mbox").read_text("utf-8")
    head, *files = text.split("diff --git a/")
    assert re.search(r'^From: "A. Person" <person@example.org>$', head, re.MULTILINE) and "\nSubject: [PATCH] " in head
    follows = re.findall(r"^Follows (#\d+), which ", head, re.MULTILINE)
    issue = (UPSTREAM / f"{mail}.md").read_text("utf-8")
    assert follows == re.findall(r"^Follows NVIDIA/NVFlare(#\d+), which ", issue, re.MULTILINE) and len(follows) == 1
    source = [one for one in files if one.startswith("nvflare/")]
    tests = [one for one in files if one.startswith("tests/unit_test/")]
    assert source and len(source) + len(tests) == len(files)
    assert any(line.startswith("+def test_") for one in tests for line in one.splitlines())
    own = (UPSTREAM / f"{mail}.patch").read_text("utf-8")
    assert LINE.findall("".join(source)) == LINE.findall(own)
    command = ["git", "apply", "--check", "--include=nvflare/*", str(UPSTREAM / f"{mail}.mbox")]
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(SITE_PACKAGES.parent)}
    done = subprocess.run(command, cwd=SITE_PACKAGES, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_part_says_once_that_nvflare_is_another(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = json.loads(compatibility.KNOWN.read_text("utf-8"))
    places = {place for own in compatibility.PLACES.values() for place in own}
    assert known.keys() == places and all(own[version("nvflare")] for own in known.values())

    # an earlier test may have loaded NVFlare's logging configuration
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


def test_need_of_audit_without_fail(tiny_disk: Path) -> None:
    """With the patch, a full disk costs only log lines."""
    AuditService.initialize(str(tiny_disk / "audit.log"))
    try:
        with (tiny_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while filler.write(bytes(4096)):
                pass
        with pytest.raises(OSError):
            for _ in range(100):
                AuditService.add_job_event("job", msg="x" * 100)
        patches.audit_without_fail()
        patches.audit_without_fail()
        for _ in range(1000):
            AuditService.add_job_event("job", msg="lost")
        (tiny_disk / "filler").unlink()
        assert AuditService.add_job_event("job", msg="after it")
    finally:
        AuditService.close()
    assert (tiny_disk / "audit.log").read_text().endswith("after it\n")


def parts_in_use(*first: Path) -> dict[str, bool]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*first, ROOT / "custom", ROOT]))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.federation.parts"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert [*map(Path, answer["nvflare"])] == [(first[0] if first else SITE_PACKAGES) / "nvflare"]
    said = {name: f"{name} is off: NVFlare" in done.stderr for name in answer["works"]}
    assert said == {name: not works for name, works in answer["works"].items()}
    return answer["works"]


@against
def test_a_part_that_nvflare_has_merged_is_off(tmp_path: Path) -> None:
    """The test applies the patches to NVFlare's source, as NVFlare's maintainers would. With the supported NVFlare,
    every patch in nvflare_reliability works.
    """

    def merged(*names: str) -> dict[str, bool]:
        place = tmp_path / names[0]
        shutil.copytree(SITE_PACKAGES / "nvflare", place / "nvflare", copy_function=os.symlink)
        for name in names:
            text = (UPSTREAM / f"{name}.patch").read_text("utf-8")
            for path in re.findall(r"^--- a/(\S+)$", text, re.MULTILINE):
                if (file := place / path).is_symlink():
                    file.unlink()
                    shutil.copyfile(SITE_PACKAGES / path, file)
            done = applied(name, place)
            assert done.returncode == 0, done.stdout
        return parts_in_use(place)

    alone = "RollingFile"  # the patches RollingFile and audit_without_fail change the same lines of NVFlare
    works, others = parts_in_use(), [name for name in PATCHED if name != alone]
    assert works.keys() == compatibility.TRIED.keys() and all(works.values()), works
    assert merged(alone) == {name: name != alone for name in works}
    assert merged(*others) == {name: name == alone for name in works}


def test_each_mail_s_row_says_whether_its_part_is_off_when_merged(root: Path) -> None:
    page = (root / "docs/trust/reliability.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| \[(\w+)\]\([^)]*upstream/\w+\.md\) \|.*\| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {*MAILS}
    assert {name for name, left in rows.items() if left == "yes"} == compatibility.TRIED.keys() & {*MAILS}


def test_need_of_hear_of_killed_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the patch, NVFlare fails all tasks after a script's process was killed, and starts no new process."""
    own = external_process_backend
    for name in ("_trainer_liveness_error", "_trainer_exit_reason"):
        monkeypatch.setattr(own.ExternalProcessBackend, name, vars(own.ExternalProcessBackend)[name])
    heard: list[int] = []
    patches.hear_of_killed_script(heard.append)
    backend, said = own.ExternalProcessBackend(), MagicMock()
    backend._context = SimpleNamespace(launch_once=True, executor=said, heartbeat_timeout=0, stop_grace_period=0.0)
    for end, signals in (("raise SystemExit(3)", []), ("import os; os.kill(os.getpid(), 9)", [9])):
        trainer = own._TrainerSession("token", "site.job.trainer")
        trainer.process = subprocess.Popen([sys.executable, "-c", end], start_new_session=True)
        trainer.pgid = trainer.process.pid
        trainer.ready.set()
        trainer.process.wait()
        backend._active_launch, backend._abort = trainer, False
        for _ in range(2):
            answer = backend.execute("train", Shareable(), FLContext(), Signal())
            assert answer.get_return_code() == NVFlaresCode.EXECUTION_EXCEPTION
        assert heard == signals and backend._active_launch is None
        backend._trainer_exit_reason(trainer)
        assert heard == 2 * signals


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """With the patch, a small message has a small buffer, and a large message over a fast connection is sent in few
    frames.
    """
    made: list[int] = []
    monkeypatch.setattr(TxTask, "start_task_thread", lambda self, _: made.append(len(self.buffer)))

    def buffer_of(size: int) -> int:
        cell.byte_streamer.send("c", "t", "x", {}, BlobStream(bytes(size), {}))
        return made.pop()

    assert buffer_of(10) == 1 << 20
    hold_less(cell)
    assert buffer_of(10) == buffer_of(1 << 20) == patches.BUFFER
    assert buffer_of(3 << 20) == 3 << 20 and buffer_of(20 << 20) == patches.LONGEST_FRAME


def test_a_large_message_passes_nvflares_http_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the patch, NVFlare's http driver closes a connection at a frame of 4 MiB."""
    # if ALL_CELLS contained several cells, NVFlare would pass messages within the process instead of over http
    monkeypatch.setattr(CoreCell, "ALL_CELLS", {})
    url = f"http://127.0.0.1:{free_port()}"
    ends = [Cell(name, url, secure=False, credentials={}) for name in ("server", "site-1")]
    asking = {"channel": "c", "topic": "t"}
    ends[0].register_request_cb(cb=lambda _: make_reply(ReturnCode.OK, body=bytes(9 << 20)), **asking)
    for end in ends:
        CoreCell.ALL_CELLS.clear()
        hold_less(end)
        end.core_cell.start()
    try:
        wait_until(lambda: ends[1].core_cell.agents, 60, "the connection")
        reply = ends[1].send_request(target="server", request=new_cell_message({}, {}), timeout=20, **asking)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK and len(reply.payload) == 9 << 20
    finally:
        for end in reversed(ends):
            end.core_cell.stop()
            StatsPoolManager.pools.clear()


def test_need_of_StreamLimits(cell: Cell) -> None:
    """Without the patch, the sender decides how long a finished stream keeps a thread, and the receiver stores pieces
    that arrive out of order.
    """
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
    wait_until(lambda: kept.completed or bool(kept.chunks), 60, "the end of the stream")
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
    """Without the patch, a request waits until its timeout when a stream of tensors is aborted."""
    refused: list[tuple] = []

    def only_end(self: Replies, stream: Any, reason: str) -> int:
        refused.append((self, stream, reason))
        patches.end_stream(stream, reason)
        return 0

    own = Replies.refuse
    monkeypatch.setattr(Replies, "refuse", only_end)
    before = len(cells.got)
    cells.send(answer_of(StudyMessage({"model": {"w": torch.zeros(25_000_000)}})), timeout=1.0)
    wait_until(lambda: bool(refused), 60, "the refusal of a piece")
    time.sleep(1.0)
    assert len(cells.got) == before
    monkeypatch.undo()
    own(*refused[-1])
    wait_until(lambda: len(cells.got) > before, 60, "the refusal of the answer")


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
    """Without the patch, NVFlare acknowledges every reply, and repeats a reply that is not acknowledged within five
    seconds.
    """
    assert "reliable=True" in inspect.getsource(Adapter._send_response) and STREAM_RETRY_WAIT == 5.0
    sent: list[dict] = []
    cell.send_blob = lambda *given, **asked: sent.append(asked)
    patches.reply_once(cell, ("pieces", "get"))
    cell.send_blob(CellChannel.RETURN_ONLY, "pieces:get", "x", Message(), reliable=True)
    cell.send_blob(CellChannel.RETURN_ONLY, "task:get", "x", Message(), reliable=True)
    assert [asked["reliable"] for asked in sent] == [False, True]


@pytest.mark.slow
def test_need_of_end_reply(cells: Cells) -> None:  # noqa: F811
    """Without the patch, a reply that was partly received before a timeout stays in memory."""
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
    """tests/federation/test_lines.py measures the patch's effect on a connection with a long delay."""
    source = inspect.getsource(_download_object)
    assert source.count("download_request_thread_pool.submit(") == 1 and "reply = pending_future.result()" in source


def test_need_of_before_script_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the patch, NVFlare's `init` accepts messages before other code can prepare the cell."""
    source, seen = inspect.getsource(CellClientAPI.init), list[str]()
    assert source.index("_register_control_cbs(self._cell)") < source.index("self._cell.start()")
    monkeypatch.setattr(CellClientAPI, "_register_control_cbs", lambda api, cell: seen.append(f"NVFlare {cell}"))
    kit_patches.before_script_connects.cache_clear()
    begin = seen.append
    for _ in range(2):  # a script may call `init` twice
        kit_patches.before_script_connects(begin)
    CellClientAPI._register_control_cbs(None, "cell")
    assert seen == ["cell", "NVFlare cell"]
    kit_patches.before_script_connects.cache_clear()


def test_need_of_send_tensors_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the patch, if a process sends a tensor too early, all later tensors of this process arrive empty."""
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
    """Without the patch, NVFlare keeps a signature made without a key, and the receiver drops every answer with this
    signature.
    """

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
    assert late.sign_auth_token("hospital-a", "token") == kit_patches.UNSIGNED
    key, stock = SimpleNamespace(sign=lambda text, return_str: f"{text} signed"), new_server()
    stock.my_own_token_signature = kit_patches.UNSIGNED
    assert signs(early) == signs(late) == "servertoken signed" != signs(stock)


def test_need_of_ask_quietly(cells: Cells, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    def errors() -> int:
        caplog.clear()
        where = {"channel": CellChannel.SERVER_COMMAND, "topic": "app_command", "target": "server.to-come"}
        reply = cells.server.send_request(**where, request=Message({}, {}), timeout=2.0)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        return len([words for words in told if "to-come" in words])

    def errors_over_the_gone() -> int:
        caplog.clear()
        gone = TargetMessage("to-come", CellChannel.CLIENT_MAIN, "admin", new_cell_message({}, "status"))
        replies = cells.server.broadcast_multi_requests({"to-come": gone}, 2.0, optional=False)
        assert replies["to-come"].get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK
        return len([one for one in caplog.records if one.levelname == "ERROR" and "to-come" in one.getMessage()])

    assert errors() > 0 and errors_over_the_gone() > 0
    kit_patches.ask_quietly(cells.server, "app_command", "admin")
    assert errors() == 0 and errors_over_the_gone() == 0


def test_need_of_start_again() -> None:
    """Without the patch, NVFlare never restarts a job's process that has died at a hospital."""
    starts = re.compile(r"(?<!def )start_client_job\(")
    files = [*Path(str(job_runner.__file__)).parent.rglob("*.py")]
    assert [path.name for path in files for _ in starts.findall(path.read_text("utf-8"))] == ["job_runner.py"]
    assert "engine.start_client_job(" in inspect.getsource(job_runner.JobRunner._start_run)


def test_need_of_wait_no_more(tmp_path: Path) -> None:
    """Without the patch, NVFlare waits for a client until the client reports, or until minutes without a heartbeat have
    passed.
    """
    runner = job_runner.JobRunner(str(tmp_path))
    runner._pending_client_outcomes["job"] = {"hospital-a"}
    assert runner.client_outcome_wait_timeout == 900.0
    assert "is_cell_connected" not in inspect.getsource(job_runner)
    context = FLContext()
    engine = SimpleNamespace(job_runner=runner)
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    assert not kit_patches.wait_no_more(context, "job", {"hospital-a"}) and not runner._pending_client_outcomes["job"]


def test_need_of_patient_simulator() -> None:
    task = inspect.getsource(simulator_runner.SimulatorClientRunner.do_one_task)
    assert task.index("get_open_ports(1)[0]") < task.lower().index("popen") < task.index("_create_connection(")
    assert "timeout" not in str(inspect.signature(simulator_runner.SimulatorRunner))


def test_a_connection_is_closed_when_a_command_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an open connection, Python would wait at exit for the thread that reads from the connection."""
    (tmp_path / "startup").mkdir()
    closed = list[Session]()
    monkeypatch.setattr(Session, "__init__", lambda own, **_: setattr(own, "api", SimpleNamespace(scheme="tcp")))
    monkeypatch.setattr(Session, "close", lambda own: closed.append(own))
    monkeypatch.setattr(kit_patches, "_only_tcp", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        kit_patches.connect("lead", tmp_path, 1.0)
    assert len(closed) == 1


def test_a_connection_reads_a_key_once(tmp_path: Path) -> None:
    """With the patch, a private key is loaded only once, although two functions of NVFlare read the key file."""
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


def test_need_of_tell_sites_apart() -> None:
    """Without the patch, a thread of NVFlare's simulator can read a site name that another thread wrote for a different
    site.
    """
    task = inspect.getsource(simulator_runner.SimulatorClientRunner.do_one_task)
    written = task.index('self.build_ctx["client_name"] = client.client_name')
    assert written < task.index("deepcopy(") < task.index("BUILD_CTX: self.build_ctx")
    program = """
import sys, threading
from types import SimpleNamespace
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorClientRunner
from nvflare_reliability.kit_patches import tell_sites_apart

given = SimpleNamespace(workspace="", log_config="", set="")
runner, read, both = SimulatorClientRunner("", given, [], None, None, {"given": 1}), [], threading.Barrier(2)
sys.argv[1:] and tell_sites_apart()

def start(name):
    both.wait()
    runner.build_ctx["client_name"] = name
    both.wait()
    read.append((name, runner.build_ctx["client_name"], runner.build_ctx["given"]))

threads = [threading.Thread(target=start, args=[name]) for name in ("site-1", "site-2")]
[one.start() for one in threads], [one.join() for one in threads]
print(all(name == found and given == 1 for name, found, given in read))
"""
    for arguments, apart in (((), "False"), (("patched",), "True")):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [apart]


def test_need_of_sites_started_by(tmp_path: Path) -> None:
    """Without the patch, NVFlare's simulator itself starts a site's process. The patch does not affect how other
    programs start processes.
    """

    class Asked(Exception):
        pass

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
