"""NVFlare's inner parts, in the processes that start jobs (a kit's, a person's, the simulator's) and in a script's own.

patches.py says what holds for each part, and has those of a job. Controller and executor do not import these.
"""

import gc
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import serialization
from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import ALL_SITES
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3 import communicator
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.private.admin_defs import MsgHeader
from nvflare.private.admin_defs import ReturnCode as MsgCode
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
from nvflare.private.fed.utils.fed_utils import extract_participants
from nvflare.utils.job_launcher_utils import get_resource_manager_spec

from nvflare_reliability.compatibility import made_for

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

AUDIT, AUDITS = 16 << 20, 10  # bytes of audit.log until it is set aside, and how many of these are kept
SITE_PROCESS = "nvflare.private.fed.app.simulator.simulator_worker"  # the program that a simulated site runs
UNSIGNED = "NA"  # the signature of a server without a key
STARTED = "Start the client app..."  # what a client replies whose process of a job starts
Outcome = tuple[bool, Any, str | None]  # of a simulated site's process: whether to stop, its result, the next site


# ---------------------------------------------------------------------------------------------------- a kit
@made_for("nvflare.fuel.f3.drivers.socket_conn:SocketConnection.read_loop")
def close_lost_connections() -> None:
    """Close the sockets of connections that were lost."""
    gc.collect()


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner.run",
    "nvflare.private.fed.server.job_runner:JobRunner.update_abnormal_finished_jobs",
)
def end_forgotten_jobs(fl_ctx: FLContext) -> None:
    """End, in the server's books, the jobs that ran when it died; nothing can run yet."""
    fl_ctx.get_engine().job_runner.update_abnormal_finished_jobs([], fl_ctx)


@made_for(
    "nvflare.private.fed.server.fed_server:FederatedServer._add_auth_headers",
    "nvflare.private.fed.server.fed_server:FederatedServer.sign_auth_token",
)
def sign_when_ready(fl_ctx: FLContext) -> None:
    """Let the server sign its messages as soon as it has its key, where it sent one before: it would never again."""
    server = fl_ctx.get_engine().server
    own = server.sign_auth_token

    def sign(name: str, token: str) -> str:
        signed = own(name, token)
        return "" if (name, signed) == (server.my_own_auth_client_name, UNSIGNED) else signed  # NVFlare asks again

    server.sign_auth_token = sign
    if server.my_own_token_signature == UNSIGNED:
        server.my_own_token_signature = ""


@made_for(
    "nvflare.private.fed.server.server_engine:ServerEngine.send_app_command",
    "nvflare.private.fed.server.server_engine:ServerEngine.send_command_to_child_runner_process",
    "nvflare.private.fed.server.message_send:send_requests",
)
def ask_quietly(cell: Cell, *topics: str) -> None:
    """Let a request on one of these topics that cannot be sent be no error in the log. It goes to one, or to several:
    each of these has a topic of its own."""
    own, own_many = cell.send_request, cell.broadcast_multi_requests

    def request(*given: Any, **asked: Any) -> Message:
        asked["optional"] = asked.get("optional", False) or asked.get("topic") in topics
        return own(*given, **asked)

    def requests(targets: dict, *given: Any, **asked: Any) -> dict:
        asked["optional"] = asked.get("optional", False) or all(one.topic in topics for one in targets.values())
        return own_many(targets, *given, **asked)

    cell.send_request, cell.broadcast_multi_requests = request, requests


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner._start_run",
    "nvflare.private.fed.server.job_runner:JobRunner._make_deploy_message",
    "nvflare.private.fed.server.server_engine:ServerEngine.start_client_job",
)
def start_again(fl_ctx: FLContext, job_id: str, client: Client) -> str:
    """Start a job that runs once more at a client; returns why that can't be, or nothing.

    The client's own policies are asked again, as when the job began.
    """
    engine = fl_ctx.get_engine()
    runner, job = engine.job_runner, engine.job_runner.running_jobs.get(job_id)
    apps = {site: app for app, sites in (job.get_deployment() if job else {}).items() for site in _named(sites)}
    app = apps.get(client.name) or apps.get(ALL_SITES)
    if app is None:
        return "the job has ended"
    order = runner._make_deploy_message(job, job.get_application(app, fl_ctx), app, fl_ctx)
    admin = engine.server.admin_server
    deployed = admin.send_requests_and_get_reply_dict({client.token: order}, timeout_secs=admin.timeout)[client.token]
    if deployed is None or deployed.get_header(MsgHeader.RETURN_CODE, MsgCode.OK) != MsgCode.OK:
        return f"the job could not be deployed: {deployed.body if deployed else 'no reply'}"
    needs = get_resource_manager_spec({**job.meta, "resource_spec": job.resource_spec}, client.name)
    enough, place = engine.check_client_resources(job, {client.name: needs}, fl_ctx).get(client.name, (False, ""))
    if not enough:
        return f"its resources do not suffice: {place or 'no reply'}"
    (reply,) = engine.start_client_job(job, {client.name: DispatchInfo(app, needs, place)}, fl_ctx) or [None]
    started = reply.reply.body if reply and reply.reply else "no reply"
    if started != STARTED:
        engine.cancel_client_resources({client.name: (True, place)}, {client.name: needs}, fl_ctx)
        return f"the job did not start: {started}"
    with runner.lock:
        runner._pending_client_outcomes.setdefault(job_id, set()).add(client.name)
    return ""


def _named(sites: Any) -> list[str]:
    """Return the names in a part of a job's deploy_map."""
    return [ALL_SITES if name.upper() == ALL_SITES else name for name in extract_participants(sites)]


def death_of_job(request: Message) -> tuple[str, str]:
    """Return the client's token and the job, when a client reports that a job's process died; otherwise, nothing."""
    told = request.payload if isinstance(request.payload, dict) else {}
    if told.get(JobFailureMsgKey.CODE) != ProcessExitCode.EXCEPTION:
        return "", ""
    return str(request.get_header(CellMessageHeaderKeys.TOKEN)), str(told.get(JobFailureMsgKey.JOB_ID))


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner._job_complete_process",
    "nvflare.private.fed.server.job_runner:JobRunner.resolve_client_outcome",
)
def wait_no_more(fl_ctx: FLContext, job_id: str, clients: set[str]) -> bool:
    """Let a job that has ended go on without the word of these clients; returns whether the server still lists it."""
    runner = fl_ctx.get_engine().job_runner
    for name in clients:
        runner.resolve_client_outcome(job_id, name)
    return job_id in runner.running_jobs


@made_for("nvflare.fuel.sec.audit:Auditor.__init__", "nvflare.fuel.sec.audit:Auditor.add_event")
class RollingFile(RotatingFileHandler):
    """A log that is set aside when it is full, as <name>.1 and so on, of which the oldest goes."""

    def write(self, line: str) -> None:
        self.emit(logging.makeLogRecord({"msg": line.rstrip("\n")}))


def bound_audit() -> None:
    """Let the audit log of this process roll."""
    if auditor := AuditService.get_auditor():
        with auditor._lock:
            if auditor.audit_file and not isinstance(auditor.audit_file, RollingFile):
                auditor.audit_file.close()
                auditor.audit_file = RollingFile(auditor.audit_file.name, "a", AUDIT, AUDITS, "utf-8")


# ---------------------------------------------------------------------------------------------------- a person
@made_for(
    "nvflare.fuel.flare_api.flare_api:Session.try_connect",
    "nvflare.fuel.f3.drivers.tcp_driver:TcpDriver.connect",
    "nvflare.fuel.f3.communicator:load_comm_drivers",
    "nvflare.fuel.f3.cellnet.credential_manager:CredentialManager.get_local_key",
    "nvflare.lighter.utils:load_private_key_file",
)
def connect(user: str, kit: Path, timeout: float) -> "Session":
    """Return a session with the server, or raise NVFlare's error when that takes longer than so many seconds.

    Whoever stops the communication once more closes such a connection, and waits with it.
    """
    from nvflare.fuel.flare_api.flare_api import Session

    ConfigService.initialize({}, [str(kit / "startup")])  # else it looks for files in all folders below the current one
    session = Session(username=user, startup_path=str(kit))
    try:
        with _each_key_once(), _only_tcp() if session.api.scheme == "tcp" else nullcontext():
            session.try_connect(timeout)
    except BaseException:  # Ctrl-C too: an open connection keeps Python from ending
        closing = threading.Thread(target=session.close, daemon=True)
        closing.start()
        closing.join(1.0)
        while closing.is_alive():
            threading.Thread(target=session.api.cell.core_cell.communicator.stop, daemon=True).start()
            closing.join(1.0)
        raise
    return session


@contextmanager
def _each_key_once() -> Iterator[None]:
    """Read a person's key once where NVFlare 2.9 reads it four times; each time all its primes are tested."""
    load, of_data = serialization.load_pem_private_key, cache(serialization.load_pem_private_key)

    def once(data: bytes, password: bytes | None, backend: object = None) -> Any:
        return of_data(data, password)

    serialization.load_pem_private_key = once  # type: ignore[assignment]
    try:
        yield
    finally:
        serialization.load_pem_private_key = load


@contextmanager
def _only_tcp() -> Iterator[None]:
    """Connect without the drivers of other schemes, whose libraries take a fifth of a short command's time."""
    drivers, name = communicator.driver_mgr, TcpDriver.__name__
    if name not in drivers.class_cache:
        drivers.class_cache.add(name)  # as NVFlare notes what it has registered
        drivers.register(TcpDriver)
    communicator.driver_loaded = True
    try:
        yield
    finally:
        communicator.driver_loaded = False  # another scheme loads the others


# ---------------------------------------------------------------------------------------------------- the simulator
@made_for(
    "nvflare.private.fed.app.simulator.simulator_runner:SimulatorClientRunner.do_one_task",
    "nvflare.private.fed.app.simulator.simulator_runner:SimulatorRunner.client_run",
)
def patient_simulator(
    job: str,
    workspace: str,
    sites: str,
    threads: int,
    patience: float,
    begin: Callable[[], None],
    run_site: Callable[..., Outcome],
) -> "SimulatorRunner":
    """Return NVFlare's simulator. patience: seconds that a site's process has to start.

    begin: is called in the process in which the server will run.
    run_site: gets a site's name and what runs its process once, and returns how that ended.
    """
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorClientRunner, SimulatorRunner

    class Sites(SimulatorClientRunner):
        def do_one_task(self, client: Any, *arguments: Any, **more: Any) -> Outcome:
            once = super().do_one_task
            return run_site(client.client_name, lambda: once(client, *arguments, **more))

    class Runner(SimulatorRunner):
        def setup(self) -> bool:
            begin()
            return super().setup()

        def client_run(self, server_custom_folder: str, clients: list, gpu: str | None) -> None:
            self.args.set = [f"simulator_worker_timeout={patience}"]
            given = self.args, clients, self.client_config, self.deploy_args, self.build_ctx
            Sites(server_custom_folder, *given).run(gpu)

    return Runner(job, workspace, clients=sites, threads=threads, max_clients=len(sites.split(",")))


@made_for("nvflare.private.fed.app.simulator.simulator_runner:SimulatorClientRunner.do_one_task")
@contextmanager
def sites_started_by(start: Callable[..., Any]) -> Iterator[None]:
    """Let this process start the simulator's sites by a function that is called as `Popen` is.

    All ways to start a program in Python end in `subprocess.Popen`, whichever of them an NVFlare takes.
    """
    own = subprocess.Popen

    class Starting(own):  # type: ignore[misc,valid-type]
        def __new__(cls, args: Any, *given: Any, **more: Any) -> Any:
            return start(args, *given, **more) if SITE_PROCESS in args else super().__new__(cls)

    subprocess.Popen = Starting  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = own  # type: ignore[misc]


@cache
@made_for("nvflare.client.cell.api:CellClientAPI.init", "nvflare.client.cell.api:CellClientAPI._register_control_cbs")
def before_script_connects(begin: Callable[[Cell], None]) -> None:
    """Have the cell of a training script's own process given to a function of ours before anything comes in."""
    from nvflare.client.cell.api import CellClientAPI

    own = CellClientAPI._register_control_cbs

    def register(api: object, cell: Cell) -> None:
        begin(cell)
        own(api, cell)

    CellClientAPI._register_control_cbs = register
