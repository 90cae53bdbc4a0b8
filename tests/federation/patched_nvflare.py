"""What an NVFlare does to which all patches of nvflare_reliability/upstream were applied: one function for each patch.

python -m tests.federation.patched_nvflare FOLDER       # with that NVFlare first on the path
"""

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.f3.cellnet.cell import Adapter, Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.connection import Mode
from nvflare.fuel.f3.drivers.driver import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobStream
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.download_service import DownloadService, download_object
from nvflare.fuel.sec import audit
from nvflare.fuel.utils import fobs
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorClientRunner
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
from nvflare.private.fed.server.server_engine import ServerEngine

from medsilo.flare import transport
from medsilo.runs.messages import StudyMessage
from tests.conftest import SITES
from tests.federation.test_transport import Server, echo

FOLDER = Path(sys.argv[1])
CELL = Cell("patched", "tcp://127.0.0.1:1", secure=False, credentials={})


def sent(size: int) -> TxTask:
    """Return the task of a message of so many bytes that nobody sends."""
    stream = BlobStream(bytes(size), {})
    return TxTask(CELL.core_cell, 1 << 20, "channel", "topic", "nobody", {}, stream, False, False, True)


def hold_less() -> None:
    assert [len(sent(size).buffer) for size in (10, 1 << 19, 3 << 20)] == [10, 1 << 19, 1 << 20]


def GarbageBudget() -> None:
    gc.disable()
    task = sent(10)
    task.stream_future.add_done_callback(lambda future: None, task.stream_future)
    left = weakref.ref(task)
    task.stop()
    del task
    assert left() is None
    gc.enable()


def close_lost_connections() -> None:
    here, there = socket.socketpair()
    there.close()
    connection = SocketConnection(here, SimpleNamespace(params={}))
    connection.read_loop()
    assert here.fileno() == -1


def limit_blobs() -> None:
    CELL.register_request_cb(channel="aux_communication", topic="*", cb=print)
    CELL.set_max_blob_size(1000)
    found = [own.cb.__self__.max_blob_size for own in CELL.byte_receiver.registry.reg.values()]
    assert len(found) > 1 and {*found} == {1000}


def send_tensors_by() -> None:
    tensor = torch.arange(3.0)
    assert fobs.loads(fobs.dumps(tensor)).shape == (0,)
    fobs.register(TensorDecomposer)
    assert torch.equal(fobs.loads(fobs.dumps(tensor)), tensor)


def look_at_messages() -> None:
    agent = ServerCommandAgent(None, None)

    def code(origin: str, command: str) -> str:
        message = Message({MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.TOPIC: command}, None)
        try:
            return agent._execute_command(message).get_header(MessageHeaderKey.RETURN_CODE)
        except AttributeError:  # it is carried out, by an engine that is not there
            return "carried out"

    assert code("hospital-a.job", "abort") == code("", "abort") == ReturnCode.INVALID_REQUEST
    assert code("server", "abort") == code("server.job", "abort") == "carried out"
    assert code("hospital-a.job", "get_task") == ReturnCode.AUTHENTICATION_ERROR  # for it has no token


def send_requests_by() -> None:
    time.sleep = lambda seconds: None
    asked = []
    line = [ReturnCode.COMM_ERROR] * 5 + [ReturnCode.TARGET_UNREACHABLE, ReturnCode.INVALID_REQUEST]

    def request(**given: Any) -> Message:
        asked.append(given)
        return make_reply(line[len(asked) - 1])

    consumer = SimpleNamespace(supports_pipelining=False, download_failed=lambda ref, reason: None)
    CELL.send_request = request
    download_object("hospital-a", "ref", 1.0, CELL, consumer)
    assert len(asked) == 1
    asked.clear()
    download_object("hospital-a", "ref", 1.0, CELL, consumer, max_silence=60.0)
    assert len(asked) == len(line)


def reply_once() -> None:
    DownloadService._initialize(CELL)
    ((channel, topic),) = CELL.reply_once_topics
    how = []
    CELL.send_blob = lambda *given, **more: (
        how.append(more["reliable"]) or SimpleNamespace(add_done_callback=lambda *done: None)
    )
    adapter = Adapter(print, CELL.core_cell.my_info, CELL)
    for where in ((channel, topic), (CellChannel.SERVER_COMMAND, "get_task")):
        adapter._send_response(make_reply(ReturnCode.OK), "request", "", *where, "hospital-a", False)
    assert how == [False, True]


def deliver_once() -> None:
    transport.deliver_once = lambda task: None
    server = Server()

    def behave() -> None:
        work = {site: server.fetch(site) for site in SITES}
        server.fetch(SITES[1])
        for site, (task_id, data) in work.items():
            server.submit(site, task_id, echo(data))

    actor = threading.Thread(target=behave, daemon=True)
    actor.start()
    assert not server.transport.ask(SITES, lambda site: StudyMessage(), lambda site, parcel: None, 10.0)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert server.monitor.is_alive()
    server.close()


def cell_of_job() -> None:
    engine = SimpleNamespace(server=SimpleNamespace(command_agent=SimpleNamespace(cell="the job's")))
    assert ServerEngine.get_job_cell(engine) == "the job's"


def end_forgotten_jobs() -> None:
    runner, context, ended = JobRunner(str(FOLDER)), FLContext(), []
    context.get_engine = lambda: SimpleNamespace(get_component=lambda name: "a job manager")
    runner.ask_to_stop = True
    runner.update_abnormal_finished_jobs = lambda running, fl_ctx: ended.append(running)
    runner.run(context)
    assert ended == [[]]


def sign_when_ready() -> None:
    server = FederatedServer.__new__(FederatedServer)
    server.logger = logging.getLogger("server")
    server.my_own_auth_client_name, server.my_own_token, server.my_own_token_signature = "server", "token", None
    for signature in ("NA", "signed"):
        server.sign_auth_token = lambda name, token, made=signature: made
        server._add_auth_headers(Message())
    assert server.my_own_token_signature == "signed"


def ask_quietly() -> None:
    asked = {}
    engine = SimpleNamespace(send_command_to_child_runner_process=lambda **given: asked.update(given))
    ServerEngine.send_app_command(engine, "job", "topic", {}, 1.0)
    assert asked["optional"] is True


def RollingFile() -> None:
    audit.MAX_FILE_SIZE, audit.MAX_FILES = 2000, 3
    auditor = audit.Auditor(str(FOLDER / "audit.log"))
    for number in range(100):
        auditor.add_event("somebody", f"command-{number}", msg="100 % of it")
    auditor.close()
    logs = [*FOLDER.glob("audit.log*")]
    assert len(logs) == 4 and all(log.stat().st_size <= 2000 for log in logs)
    assert "command-99" in (FOLDER / "audit.log").read_text("utf-8")


def connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        driver, stopped = TcpDriver(), threading.Event()
        driver.register_conn_monitor(SimpleNamespace(state_change=lambda connection: None))
        params = {DriverParams.HOST.value: "127.0.0.1", DriverParams.PORT.value: listening.getsockname()[1]}
        stopped.set()
        given = ConnectorInfo("handle", driver, params, Mode.ACTIVE, 0, 0, False, stopped)
        connecting = threading.Thread(target=driver.connect, args=(given,), daemon=True)
        connecting.start()
        connecting.join(3)
        assert not connecting.is_alive()


def sites_started_by() -> None:
    assert SimulatorClientRunner.start_process is subprocess.Popen


PATCHES = (
    hold_less,
    GarbageBudget,
    close_lost_connections,
    limit_blobs,
    send_tensors_by,
    look_at_messages,
    reply_once,
    deliver_once,
    cell_of_job,
    end_forgotten_jobs,
    sign_when_ready,
    ask_quietly,
    RollingFile,
    connect,
    sites_started_by,
    send_requests_by,  # it changes the clock
)


def main() -> None:
    """Print the names of the patches that do what they say here."""
    for patch in PATCHES:
        with suppress(AssertionError, AttributeError, TypeError, IndexError):
            patch()
            print(patch.__name__, flush=True)
    os._exit(0)  # a connection may still be read from


if __name__ == "__main__":
    main()
