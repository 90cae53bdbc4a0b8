"""Patch NVFlare in all processes that are not a job's processes.

The patched processes are the parent processes of the server and of hospitals, the simulator, users' commands and
training scripts. The module patches.py contains the rules for all patches, and the patches for a job's processes.
"""

import asyncio.constants
import gc
import logging
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from logging.handlers import RotatingFileHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import serialization
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey, ConfigVarName, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import ALL_SITES, JobMetaKey, RunStatus
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.apis.workspace import Workspace
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3 import communicator
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CellAgent
from nvflare.fuel.f3.cellnet.defs import CellChannelTopic, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.drivers import tcp_driver
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver, TcpStreamServer
from nvflare.fuel.f3.message import Message
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.admin_defs import MsgHeader
from nvflare.private.admin_defs import ReturnCode as MsgCode
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey, TrainingTopic
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.fed.utils.fed_utils import extract_participants
from nvflare.utils.job_launcher_utils import get_resource_manager_spec

from nvflare_reliability.compatibility import is_merged, made_for
from nvflare_reliability.errors import one_line
from nvflare_reliability.patches import HANDSHAKE, connect_in_time, end_socket, keep_alive
from nvflare_reliability.revocation import Revocations

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

LOG = logging.getLogger(__name__)
BACKLOG = 512  # maximum number of incoming connections that wait until the server accepts them
# the number of connections is limited, because NVFlare uses `select`, which only handles file descriptors up to 1023
MOST_OF_ONE, MOST = 64, 256  # maximum numbers of simultaneous handshakes: from one address, and from all addresses
SAID_AGAIN = 3600.0  # seconds for which further failed handshakes of the same address are not logged
AUDIT, AUDITS = 16 << 20, 10  # maximum bytes of audit.log, and maximum number of older audit logs that are kept
SITE_PROCESS = "nvflare.private.fed.app.simulator.simulator_worker"
DEATHS = (  # exit codes of job processes that were killed or that crashed
    *(ProcessExitCode.EXCEPTION, ProcessExitCode.UNSAFE_COMPONENT, ProcessExitCode.CONFIG_ERROR),
    ProcessExitCode.INFRASTRUCTURE_ERROR,
)
TOLD = "revoked-certificates"  # header of a reply that contains the list of revoked certificates
DISABLED = "is disabled"  # the last words of the server's reply to an excluded client
UNSIGNED = "NA"  # the text that a server without a key puts in the place of a signature
DEPLOYING = 60.0  # seconds that the server waits for the clients' replies to the deployment of a job
STARTED = "Start the client app..."  # the reply of a client that has started a job's process
KEYS: dict[tuple[bytes, bytes | None], Any] = {}  # the loaded private keys, by PEM text and password
# three values: whether to stop, the result of a simulated site's process, and the next site
Outcome = tuple[bool, Any, str | None]


# ---------------------------------------------------------------------------------------- server and hospitals
@made_for(
    "nvflare.fuel.f3.drivers.tcp_driver:TcpStreamServer.__init__",
    "nvflare.fuel.f3.drivers.tcp_driver:TcpDriver.listen",
    "nvflare.fuel.f3.drivers.socket_conn:ConnectionHandler.handle",
)
def shake_hands_apart() -> None:
    """Do each incoming TLS handshake in a separate thread, and limit the time of a handshake."""
    from nvflare.fuel.f3.drivers.grpc_driver import GRPC_DEFAULT_OPTIONS

    tcp_driver.TcpStreamServer = _Listener
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE
    GRPC_DEFAULT_OPTIONS.append(("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)))


class _Listener(TcpStreamServer):
    """Accepts connections before their TLS handshakes, and closes connections whose certificates are revoked."""

    request_queue_size = BACKLOG

    def __init__(self, driver: Any, connector: Any) -> None:
        self.strangers = Strangers()
        self.revocations = Revocations(connector.params.get(DriverParams.CA_CERT.value))
        self.revocations.look()
        self.there: dict[Any, bytes | None] = {}  # the other party's certificate for each open connection
        super().__init__(driver, connector)

    def service_actions(self) -> None:
        """Close the connections whose certificates were revoked; the base class calls this method twice per second."""
        super().service_actions()
        if self.revocations.look():
            for request, certificate in [*self.there.items()]:
                if self.revocations.holds(certificate):
                    end_socket(request)

    def server_activate(self) -> None:
        if self.ssl_context:
            self.socket.do_handshake_on_connect = False
        super().server_activate()

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:
        if self.ssl_context:
            self.strangers.come(request, client_address[0])
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: tuple[str, int]) -> None:
        keep_alive(request)
        if self.ssl_context:
            try:
                until, first = monotonic() + HANDSHAKE, select.poll()
                first.register(request, select.POLLIN)
                if not first.poll(1000 * HANDSHAKE):
                    raise TimeoutError
                self.strangers.speaks(request)
                request.settimeout(max(0.001, until - monotonic()))
                request.do_handshake()
                request.settimeout(None)
                self.there[request] = request.getpeercert(binary_form=True)
                if self.revocations.holds(self.there[request]):
                    self.strangers.say(client_address[0], "has a certificate that the consortium revoked")
                    raise PermissionError("revoked")
            except TimeoutError:
                self.strangers.say(client_address[0], f"did not shake hands within {HANDSHAKE:g} s")
                raise
            finally:
                self.strangers.go(request)
        super().finish_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.there.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: socket.socket, client_address: tuple[str, int]) -> None:
        """Log a failed connection at the level DEBUG. At a log level above DEBUG, any computer could fill the disk with
        log lines.
        """
        LOG.debug("no connection of %s: %s", client_address[0], sys.exc_info()[1])


class AskingDeployer(AppDeployer):
    """Deploys jobs as NVFlare does, and then asks a function whether the job may start.

    Args:
        ask: Returns the reason why a job must not start, or an empty text if the job may start.
    """

    def __init__(self, ask: Callable[[Workspace, str, FLContext], str]) -> None:
        super().__init__()
        self.ask = ask

    def deploy(
        self,
        workspace: Workspace,
        job_id: str,
        job_meta: dict[str, Any],
        app_name: str,
        app_data: bytes,
        fl_ctx: FLContext,
    ) -> str:
        if error := super().deploy(workspace, job_id, job_meta, app_name, app_data, fl_ctx):
            return str(error)
        reason = self.ask(workspace, job_id, fl_ctx)
        if reason:
            shutil.rmtree(workspace.get_run_dir(job_id), ignore_errors=True)
        return reason


def has_image_of_its_own(meta: Mapping[str, Any], site: str) -> bool:
    """Return True if a job's metadata names a container image for a site, or contains code for the site."""
    return bool(AppAuthzService.derive_local_app_info({}, dict(meta), site).get(AppValidationKey.BYOC))


class Strangers:
    """Limits the number of connections whose TLS handshakes are not complete.

    If too many handshakes are incomplete, the address with the most connections loses a connection. The address loses
    the oldest of its connections that have sent no data; if all have sent data, it loses its oldest connection.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # the connections, from the oldest to the latest, each with its address
        self.waiting: dict[socket.socket, str] = {}
        self.speaking = set[socket.socket]()
        self.said: dict[str, float] = {}  # time of the last log line about each address

    def come(self, line: socket.socket, address: str) -> None:
        with self.lock:
            self.waiting[line] = address
            many = Counter(self.waiting.values())
            if many[address] <= MOST_OF_ONE:
                address = many.most_common(1)[0][0]
            if many[address] <= MOST_OF_ONE and len(self.waiting) <= MOST:
                return
            own = [one for one, its in self.waiting.items() if its == address]
            victim = next((one for one in own if one not in self.speaking), own[0])
            self._forget(victim)
        end_socket(victim)
        self.say(address, f"has more than {MOST_OF_ONE} connections that do not shake hands")

    def speaks(self, line: socket.socket) -> None:
        with self.lock:
            if line in self.waiting:
                self.speaking.add(line)

    def _forget(self, line: socket.socket) -> None:
        self.waiting.pop(line, None)
        self.speaking.discard(line)

    def go(self, line: socket.socket) -> None:
        with self.lock:
            self._forget(line)

    def say(self, address: str, message: str) -> None:
        """Log a problem with an address, unless a problem with this address was logged recently."""
        now = monotonic()
        with self.lock:
            self.said = {one: then for one, then in self.said.items() if now - then < SAID_AGAIN}
            new = address not in self.said and len(self.said) < MOST
            if new:
                self.said[address] = now
        if new:
            LOG.warning("%s %s", address, message)


def closes_lost() -> bool:
    """Return True if the installed NVFlare closes its socket after the other party has closed the connection."""
    here, there = socket.socketpair()
    with here, there:
        connection = SocketConnection(here, SimpleNamespace(params={}))
        there.close()
        connection.read_loop()
        return here.fileno() == -1


@made_for("nvflare.fuel.f3.drivers.socket_conn:SocketConnection.read_loop", merged=closes_lost)
def close_lost_connections() -> None:
    """Close the sockets of lost connections, which would otherwise stay open until a garbage collection."""
    gc.collect()


def ends_forgotten() -> bool:
    """Return True if the installed NVFlare ends the jobs that ran when the server died.

    If NVFlare ends the jobs of a dead server, the method `run` of the job runner does so.
    """
    from nvflare.private.fed.server.job_runner import JobRunner

    return JobRunner.update_abnormal_finished_jobs.__name__ in JobRunner.run.__code__.co_names


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner.run",
    "nvflare.private.fed.server.job_runner:JobRunner.update_abnormal_finished_jobs",
    merged=ends_forgotten,
)
def end_forgotten_jobs(fl_ctx: FLContext) -> None:
    """Mark those jobs as ended that ran when the server crashed. This function must be called before the server can
    start a job.
    """
    fl_ctx.get_engine().job_runner.update_abnormal_finished_jobs([], fl_ctx)


def signs_when_ready() -> bool:
    """Return True if the installed NVFlare tries to sign again after it has sent a message without a signature."""
    from nvflare.private.fed.server.fed_server import FederatedServer

    server, signatures = FederatedServer.__new__(FederatedServer), [UNSIGNED, "signed"]
    server.my_own_auth_client_name, server.my_own_token, server.my_own_token_signature = "server", "token", None
    server.logger, server.sign_auth_token = LOG, lambda name, token: signatures.pop(0)
    for _ in range(2):
        server._add_auth_headers(message := Message())
    return bool(message.get_header(CellMessageAuthHeaderKey.TOKEN_SIGNATURE) == "signed")


@made_for(
    "nvflare.private.fed.server.fed_server:FederatedServer._add_auth_headers",
    "nvflare.private.fed.server.fed_server:FederatedServer.sign_auth_token",
    merged=signs_when_ready,
)
def sign_when_ready(fl_ctx: FLContext) -> None:
    """Make the server sign its messages as soon as the server has its key.

    Without this patch, a server that has once sent an unsigned message never signs a message afterwards.
    """
    server = fl_ctx.get_engine().server
    own = server.sign_auth_token

    def sign(name: str, token: str) -> str:
        signed = own(name, token)
        # after an empty signature, NVFlare makes a new signature for the next message
        return "" if (name, signed) == (server.my_own_auth_client_name, UNSIGNED) else signed

    server.sign_auth_token = sign
    if server.my_own_token_signature == UNSIGNED:
        server.my_own_token_signature = ""


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner.run",
    "nvflare.private.fed.server.job_cmds:JobCommandModule.abort_job",
)
def keep_aborted(fl_ctx: FLContext) -> None:
    """Keep the status "aborted" of a job that was aborted while it started.

    Without this patch, NVFlare replaces the status "aborted" by "running".
    """
    engine = fl_ctx.get_engine()
    books: Any = engine.get_component(SystemComponents.JOB_MANAGER)
    own, deciding = books.set_status, threading.Lock()

    def set_status(job_id: str, status: RunStatus, fl_ctx: FLContext) -> None:
        with deciding:
            starts = status in (RunStatus.DISPATCHED, RunStatus.RUNNING)
            job = books.get_job(job_id, fl_ctx) if starts else None
            aborted = job is not None and job.meta.get(JobMetaKey.STATUS) == RunStatus.FINISHED_ABORTED
            if not aborted:
                own(job_id, status, fl_ctx)
        if aborted and status == RunStatus.RUNNING:
            engine.job_runner.stop_run(job_id, fl_ctx)

    books.set_status = set_status


@made_for("nvflare.private.fed.server.job_cmds:JobCommandModule.abort_job")
def hear_of_aborts(heard: Callable[[str, str], None]) -> None:
    """Call a function when an authorised user aborts a job.

    The function is also called for a job that no longer runs; NVFlare itself would only reply that such a job is
    completed. This patch must be applied while a server starts, before NVFlare registers its commands.

    Args:
        heard: Called with the job's ID and the user's name.
    """
    from nvflare.private.fed.server.job_cmds import JobCommandModule

    own = JobCommandModule.abort_job

    @wraps(own)
    def abort(self: JobCommandModule, conn: Any, args: list[str]) -> None:
        heard(str(conn.get_prop(self.JOB_ID)), str(conn.get_prop(ConnProps.USER_NAME)))
        own(self, conn, args)

    JobCommandModule.abort_job = abort


@made_for(
    "nvflare.private.fed.server.server_engine:ServerEngine.send_app_command",
    "nvflare.private.fed.server.server_engine:ServerEngine.send_command_to_child_runner_process",
    "nvflare.private.fed.server.message_send:send_requests",
)
def ask_quietly(cell: Cell, *topics: str) -> None:
    """Log no error if a request with one of the given topics can't be sent.

    Args:
        *topics: The topics. NVFlare uses different topics for a request to one client and for a request to several
            clients.
    """
    own, own_many = cell.send_request, cell.broadcast_multi_requests

    def request(*args: Any, **kwargs: Any) -> Message:
        kwargs["optional"] = kwargs.get("optional", False) or kwargs.get("topic") in topics
        return own(*args, **kwargs)

    def requests(targets: dict, *args: Any, **kwargs: Any) -> dict:
        kwargs["optional"] = kwargs.get("optional", False) or all(target.topic in topics for target in targets.values())
        return own_many(targets, *args, **kwargs)

    cell.send_request, cell.broadcast_multi_requests = request, requests


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner._deploy_job",
    "nvflare.private.fed.server.job_runner:JobRunner._make_deploy_message",
    "nvflare.private.fed.server.message_send:send_requests",
    merged=lambda: hasattr(ConfigVarName, "DEPLOY_TIMEOUT"),
)
def wait_for_deployment(cell: Cell) -> None:
    """Wait DEPLOYING seconds for the replies to the deployment of a job. Requests that do not deploy a job keep their
    time limits.

    NVFlare itself waits for a deployment only as long as for any command, by default 10 seconds. A client that checks
    the job's code may need longer than 10 seconds.

    Args:
        cell: The cell of the server's parent process.
    """
    own = cell.broadcast_multi_requests

    def requests(targets: dict, timeout: float, *args: Any, **kwargs: Any) -> dict:
        deploys = any(_is_deployment(target.message) for target in targets.values())
        return own(targets, max(timeout, DEPLOYING) if deploys else timeout, *args, **kwargs)

    cell.broadcast_multi_requests = requests


def _is_deployment(message: Message) -> bool:
    return isinstance(message.payload, AdminMessage) and message.payload.topic == TrainingTopic.DEPLOY


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner._start_run",
    "nvflare.private.fed.server.job_runner:JobRunner._make_deploy_message",
    "nvflare.private.fed.server.server_engine:ServerEngine.start_client_job",
)
def start_again(fl_ctx: FLContext, job_id: str, client: Client) -> str:
    """Restart a job's process at a client while the job runs. Before the restart, the client checks its policies.

    If the process was not started, return the reason; otherwise, return an empty text.
    """
    engine = fl_ctx.get_engine()
    runner, job = engine.job_runner, engine.job_runner.running_jobs.get(job_id)
    apps = {site: app for app, sites in (job.get_deployment() if job else {}).items() for site in _named(sites)}
    app = apps.get(client.name) or apps.get(ALL_SITES)
    if app is None:
        return "the job has ended"
    order = runner._make_deploy_message(job, job.get_application(app, fl_ctx), app, fl_ctx)
    admin = engine.server.admin_server
    deployed = admin.send_requests_and_get_reply_dict({client.token: order}, timeout_secs=DEPLOYING)[client.token]
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


def is_expelled(engine: Any, client: str) -> bool:
    return bool(engine.server.client_manager.is_client_disabled(client))


@made_for(
    "nvflare.private.fed.server.server_engine:ServerEngine.disable_clients",
    "nvflare.private.fed.server.fed_server:FederatedServer.client_heartbeat",
    "nvflare.private.fed.client.communicator:Communicator.send_heartbeat",
)
def hear_of_expulsion(engine: Any, heard: Callable[[], None], answered: Callable[[object], None]) -> None:
    """End the jobs of a client that the server has excluded. NVFlare would only log the exclusion, and continue the
    jobs.

    Args:
        heard: Called each time the server rejects a heartbeat because the client is excluded.
        answered: Called each time the server accepts a heartbeat. The argument is the text that `tell_with_heartbeats`
            has added to the reply, or None.
    """
    cell = engine.get_cell()
    own = cell.send_request

    def request(*args: Any, **kwargs: Any) -> Message:
        reply = own(*args, **kwargs)
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        beats = kwargs.get("topic") == CellChannelTopic.HEART_BEAT
        if beats and code == CellCode.OK:
            answered(reply.get_header(TOLD))
        elif beats and code == CellCode.UNAUTHENTICATED and DISABLED in str(reply.get_header(MessageHeaderKey.ERROR)):
            for job in list(engine.get_all_job_ids()):
                engine.abort_app(job)
            heard()
        return reply

    cell.send_request = request


@made_for(
    "nvflare.private.fed.client.communicator:Communicator.send_heartbeat",
    "nvflare.private.fed.client.communicator:Communicator._clean_up_runs",
    "nvflare.fuel.f3.cellnet.core_cell:CoreCell.state_change",
)
def beat_when_connected(engine: Any) -> None:
    """Send a heartbeat as soon as a client is connected to the server again.

    A restarted server knows a client only after the client's heartbeat, and NVFlare may send the next heartbeat ten
    seconds later.
    """
    cell, last = engine.get_cell(), dict[str, Any]()
    own = cell.send_request

    def request(*args: Any, **kwargs: Any) -> Message:
        if kwargs.get("topic") == CellChannelTopic.HEART_BEAT:
            sent = kwargs["request"]
            # the message is copied before NVFlare encodes it, so that the copy can be sent again
            last.update(kwargs, request=new_cell_message(dict(sent.headers), sent.payload))
        return own(*args, **kwargs)

    def beat() -> None:
        headers = {**last["request"].headers, CellMessageHeaderKeys.JOB_IDS: engine.get_all_job_ids()}
        again = {**last, "request": new_cell_message(headers, last["request"].payload)}
        reply = cell.send_request(**again)
        for job in reply.get_header(CellMessageHeaderKeys.ABORT_JOBS) or ():
            engine.abort_app(job, heartbeat_cleanup=True)

    def connected(other: CellAgent) -> None:
        if other.get_fqcn() == FQCN.ROOT_SERVER and last:
            threading.Thread(target=beat, daemon=True).start()

    cell.send_request = request
    cell.core_cell.set_cell_connected_cb(connected)


@made_for(
    "nvflare.private.fed.server.fed_server:FederatedServer._generate_reply",
    "nvflare.private.fed.server.fed_server:FederatedServer.client_heartbeat",
)
def tell_with_heartbeats(server: Any, text: Callable[[], str]) -> None:
    """Add a text to each reply of the server to a client's heartbeat.

    Args:
        text: Returns the text. An empty text is not added.
    """
    own = server._generate_reply

    def reply(headers: dict[str, Any], *args: Any, **more: Any) -> Message:
        told = text()
        return own({**headers, TOLD: told} if told else headers, *args, **more)

    server._generate_reply = reply


def _named(sites: Any) -> list[str]:
    return [ALL_SITES if name.upper() == ALL_SITES else name for name in extract_participants(sites)]


def failure_of_job(request: Message) -> tuple[str, str, int, str]:
    """Parse a client's report that a job process has ended.

    Return the client's token, the job's ID, the exit code and the reason.
    """
    told = request.payload if isinstance(request.payload, dict) else {}
    code, why = told.get(JobFailureMsgKey.CODE), one_line(told.get(JobFailureMsgKey.REASON) or "", 300)
    token, job = request.get_header(CellMessageHeaderKeys.TOKEN), told.get(JobFailureMsgKey.JOB_ID)
    return str(token), str(job), code if isinstance(code, int) else 0, why


@made_for("nvflare.private.fed.client.client_executor:JobExecutor._wait_child_process_finish")
def say_why(engine: Any, reason: Callable[[str], str]) -> None:
    """When a client reports the end of a job process, replace the reason in this report by a more precise reason.

    NVFlare reports "infrastructure error" for each process that ends while it starts.

    Args:
        reason: Returns the reason why a job's process ended, or an empty text if the reason is unknown.
    """
    cell = engine.get_cell()
    own = cell.send_request

    def request(*args: Any, **kwargs: Any) -> Message:
        told = kwargs["request"].payload if kwargs.get("topic") == CellChannelTopic.REPORT_JOB_FAILURE else None
        if isinstance(told, dict) and told.get(JobFailureMsgKey.CODE) in DEATHS:
            told[JobFailureMsgKey.REASON] = reason(str(told[JobFailureMsgKey.JOB_ID])) or told[JobFailureMsgKey.REASON]
        return own(*args, **kwargs)

    cell.send_request = request


@made_for(
    "nvflare.private.fed.server.job_runner:JobRunner._job_complete_process",
    "nvflare.private.fed.server.job_runner:JobRunner.resolve_client_outcome",
)
def wait_no_more(fl_ctx: FLContext, job_id: str, clients: set[str]) -> bool:
    """Make a job finish although some clients have not sent their final reports.

    Return True if the server still lists the job as running.
    """
    runner = fl_ctx.get_engine().job_runner
    for name in clients:
        runner.resolve_client_outcome(job_id, name)
    return job_id in runner.running_jobs


def rolls_audit() -> bool:
    """Return True if the installed NVFlare starts a new audit log when the log is full."""
    with TemporaryDirectory() as folder:
        auditor = Auditor(f"{folder}/audit.log")
        rolls = hasattr(auditor.audit_file, "doRollover")
        auditor.close()
    return rolls


@made_for(
    "nvflare.fuel.sec.audit:Auditor.__init__",
    "nvflare.fuel.sec.audit:Auditor.add_event",
    merged=rolls_audit,
    whole=False,
)
class RollingFile(RotatingFileHandler):
    """A log file that is renamed to <name>.1 when the file is full.

    When a log file is renamed to <name>.1, the old <name>.1 is renamed to <name>.2, and so on. The oldest of these log
    files is deleted.
    """

    def write(self, line: str) -> None:
        self.emit(logging.makeLogRecord({"msg": line.rstrip("\n")}))


def bound_audit() -> None:
    """Limit the size of this process's audit log: a full log is renamed, and a new log begins."""
    auditor = AuditService.get_auditor()
    if auditor and not is_merged("RollingFile"):
        with auditor._lock:
            if auditor.audit_file and not isinstance(auditor.audit_file, RollingFile):
                auditor.audit_file.close()
                auditor.audit_file = RollingFile(auditor.audit_file.name, "a", AUDIT, AUDITS, "utf-8")


# ---------------------------------------------------------------------------------------------------- users
@made_for(
    "nvflare.fuel.flare_api.flare_api:Session.try_connect",
    "nvflare.fuel.f3.drivers.tcp_driver:TcpDriver.connect",
    "nvflare.fuel.f3.communicator:load_comm_drivers",
    "nvflare.fuel.f3.cellnet.credential_manager:CredentialManager.get_local_key",
    "nvflare.lighter.utils:load_private_key_file",
)
def connect(user: str, kit: Path, timeout: float) -> "Session":
    """Connect to the server, and return the session. Raise NVFlare's error if the server does not answer in time.

    After an error, the session is closed. If closing the session takes longer than a second, the connection attempt is
    stopped, too.
    """
    from nvflare.fuel.flare_api.flare_api import Session

    connect_in_time()
    # without this call, NVFlare searches all folders below the current folder for its configuration
    ConfigService.initialize({}, [str(kit / "startup")])
    session = Session(username=user, startup_path=str(kit))
    try:
        with _each_key_once(), _only_tcp() if session.api.scheme == "tcp" else nullcontext():
            session.try_connect(timeout)
    # the connection must be closed even after Ctrl-C, because Python can't exit while a connection is open
    except BaseException:
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
    """Load each private key only once in this process.

    NVFlare 2.9 loads a user's private key four times, and each time tests the key's primes.
    """
    load = serialization.load_pem_private_key

    def once(data: bytes, password: bytes | None, backend: object = None) -> Any:
        if (data, password) not in KEYS:
            KEYS[data, password] = load(data, password)
        return KEYS[data, password]

    serialization.load_pem_private_key = once  # type: ignore[assignment]
    try:
        yield
    finally:
        serialization.load_pem_private_key = load


@contextmanager
def _only_tcp() -> Iterator[None]:
    """Load only NVFlare's driver for TCP, because loading all drivers takes a fifth of the duration of a short
    command.
    """
    drivers, name = communicator.driver_mgr, TcpDriver.__name__
    if name not in drivers.class_cache:
        drivers.class_cache.add(name)  # NVFlare recognises a registered driver by its name in the cache
        drivers.register(TcpDriver)
    communicator.driver_loaded = True
    try:
        yield
    finally:
        communicator.driver_loaded = False  # a later connection may need the drivers for protocols other than TCP


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
    """Create an NVFlare simulator with a longer time limit for the start of a site.

    Args:
        patience: The time limit for the start of a site's process, in seconds.
        begin: A function that is called in the server's process.
        run_site: Runs a site and returns the outcome. The arguments are the site's name and a function that runs the
            site's process once.
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


@cache
@made_for("nvflare.private.fed.app.simulator.simulator_runner:SimulatorClientRunner.do_one_task")
def tell_sites_apart() -> None:
    """Let each thread of NVFlare's simulator write the name of its site into a separate dictionary.

    Without this patch, all threads share one dictionary. If two sites start at the same time without this patch, one
    site's process gets the other site's name, and finds no plan.
    """
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorClientRunner

    own = threading.local()

    def of_thread(runner: SimulatorClientRunner) -> dict[str, Any]:
        if getattr(own, "runner", None) is not runner:
            own.runner, own.facts = runner, dict(vars(runner)["build_ctx"])
        facts: dict[str, Any] = own.facts
        return facts

    def keep(runner: SimulatorClientRunner, shared: dict[str, Any]) -> None:
        vars(runner)["build_ctx"] = shared

    SimulatorClientRunner.build_ctx = property(of_thread, keep)


@made_for("nvflare.private.fed.app.simulator.simulator_runner:SimulatorClientRunner.do_one_task")
@contextmanager
def sites_started_by(start: Callable[..., Any]) -> Iterator[None]:
    """Inside the `with` block, start the simulator's sites by another function, which takes the arguments of `Popen`.

    The patch works with each version of NVFlare, because every version starts programs with `subprocess.Popen`, which
    the patch replaces.
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
    """Call a function before the cell of a training script's process receives messages."""
    from nvflare.client.cell.api import CellClientAPI

    own = CellClientAPI._register_control_cbs

    def register(api: object, cell: Cell) -> None:
        begin(cell)
        own(api, cell)

    CellClientAPI._register_control_cbs = register
