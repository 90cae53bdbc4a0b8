"""The one list of NVFlare's names that the package uses, with what it relies on of each.

Each contract names what it covers and says in words what must hold. Of what every study does, the tests of studies are
the use; a contract whose use only a long test would show has a small real one for its body.
tests/federation/test_nvflare_names.py runs them, and holds the list to what the package uses: a new use without a line
here fails, and so does a line without a use. Whoever tries another NVFlare (`make upgrade`) reads here what changed.
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.nvflare_uses import has, is_module

MODULES = "nvflare"


@dataclass(frozen=True)
class Contract:
    """Names of one NVFlare module, what the package relies on, and a use that shows it."""

    module: str
    names: tuple[str, ...]
    shows: Callable[[Any], None]  # gets the module
    given: tuple[str, ...] = ()  # names of what NVFlare hands us, which is of a subclass: the use shows them

    @property
    def words(self) -> str:
        return inspect.cleandoc(self.shows.__doc__ or "")

    def check(self) -> None:
        """Fail with the name that is gone, or with what no longer holds."""
        for name in self.names:
            assert name in self.given or stands(self.module, name), (
                f"{self.module}.{name} is gone; we rely on it: {self.words}"
            )
        self.shows(import_module(self.module))


def stands(module: str, name: str) -> bool:
    """Return whether a dotted name is in a module; what a call returns is for the contract's own use to show."""
    if not is_module(module):
        return False
    found: Any = import_module(module)
    for part in name.split("."):
        if inspect.isclass(found):
            if not has(f"{found.__module__}.{found.__qualname__}", part):
                return False
            found = getattr(found, part, None)
        elif inspect.ismodule(found):
            if not hasattr(found, part) and not is_module(f"{found.__name__}.{part}"):
                return False
            found = getattr(found, part) if hasattr(found, part) else import_module(f"{found.__name__}.{part}")
        else:
            return True
    return True


CONTRACTS: list[Contract] = []


def relies(module: str, *names: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter a contract into the list; each text may hold several names, and `?` marks those of a subclass."""
    every = " ".join(names).split()
    plain = tuple(name.removeprefix("?") for name in every)
    given = tuple(name.removeprefix("?") for name in every if name.startswith("?"))

    def enter(shows: Callable[[Any], None]) -> Callable[[Any], None]:
        CONTRACTS.append(Contract(f"{MODULES}.{module}", plain, shows, given))
        return shows

    return enter


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Fail unless a function takes these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise AssertionError(f"{getattr(function, '__qualname__', function)} is called otherwise: {error}") from error


def source_holds(thing: Any, *texts: str) -> None:
    """Fail unless the source of something of NVFlare's holds these texts: for what only a running server shows."""
    source = inspect.getsource(thing)
    for text in texts:
        assert text in source, f"{thing.__name__} no longer holds {text!r}"


# ---------------------------------------------------------------------------------------------------- messages
@relies(
    "apis.shareable",
    "Shareable.get_header Shareable.set_header Shareable.get_return_code Shareable.set_return_code",
    "Shareable.__repr__ Shareable.get_peer_context Shareable.set_peer_context ReservedHeaderKey.HEADERS make_reply",
)
def shareable(module: Any) -> None:
    """A message is a dictionary with headers under ReservedHeaderKey.HEADERS; a return code and a peer's context are
    headers; without a code it is the given default, and make_reply gives one that has this code."""


@relies(
    "apis.dxo",
    "DXO.data DXO.data_kind DXO.meta DXO.to_shareable DataKind.COLLECTION DataKind.WEIGHTS from_shareable",
)
def dxo(module: Any) -> None:
    """A collection of tensors by group, with meta beside them, survives the way through a Shareable unchanged; what is
    no DXO raises ValueError."""


@relies(
    "apis.fl_context",
    "FLContext.get_prop FLContext.set_prop FLContext.get_identity_name FLContext.get_job_id",
    "FLContext.get_engine.get_clients.name FLContext.get_engine.get_cell FLContext.get_engine.get_workspace",
    "FLContext.get_engine.register_app_command FLContext.get_engine.server.command_agent.cell",
    "FLContext.get_engine.job_runner.update_abnormal_finished_jobs",
)
def context(module: Any) -> None:
    """A context has properties, and knows the party's name, the job and the engine. The server's engine tells its
    clients, registers commands of an app and has the job's cell at server.command_agent.cell, in a simulation, too; the
    hospital's engine and that of the server's own process have get_cell.
    The parent's engine has the job runner, which ends in its books the jobs that it is not
    told of as running."""
    found = module.FLContext()
    found.set_prop("own", 1, private=True, sticky=False)
    assert found.get_prop("own") == 1 and found.get_prop("other") is None
    key = import_module(f"{MODULES}.apis.fl_constant").ReservedKey
    found.set_prop(key.ENGINE, "engine", private=True, sticky=False)
    found.set_prop(key.IDENTITY_NAME, "hospital-a", private=False, sticky=False)
    assert found.get_engine() == "engine" and found.get_identity_name() == "hospital-a"
    takes(found.get_job_id)
    server = f"{MODULES}.private.fed.server"
    engine = import_module(f"{server}.server_engine").ServerEngine
    takes(engine.register_app_command, "self", "topic", print)
    takes(engine.get_clients, "self")
    takes(engine.get_workspace, "self")
    takes(engine.get_cell, "self")
    takes(import_module(f"{MODULES}.private.fed.client.client_run_manager").ClientRunManager.get_cell, "self")
    source_holds(import_module(f"{server}.server_command_agent").ServerCommandAgent.__init__, "self.cell = cell")
    source_holds(import_module(f"{server}.fed_server").FederatedServer, "self.command_agent = ServerCommandAgent(")
    source_holds(engine, "self.job_runner", "self.server = server")
    takes(import_module(f"{server}.job_runner").JobRunner.update_abnormal_finished_jobs, "self", [], found)


@relies(
    "apis.fl_context",
    "FLContext.get_engine.server.my_own_auth_client_name FLContext.get_engine.server.my_own_token_signature",
    "FLContext.get_engine.server.sign_auth_token",
)
def signed_messages(module: Any) -> None:
    """The server's engine has the server, which signs its own messages under its own name, and keeps the signature."""
    server = import_module(f"{MODULES}.private.fed.server.fed_server").FederatedServer
    source_holds(server._add_auth_headers, "self.sign_auth_token(self.my_own_auth_client_name, self.my_own_token)")
    source_holds(server._add_auth_headers, "if not self.my_own_token_signature:")
    takes(server.sign_auth_token, "self", "name", "token")
    assert module.FLContext().get_engine() is None


@relies(
    "apis.fl_context",
    "FLContext.get_engine.cancel_client_resources FLContext.get_engine.check_client_resources.get",
    "FLContext.get_engine.client_manager.clients.get.name FLContext.get_engine.get_cell.is_cell_connected",
    "FLContext.get_engine.get_cell.register_request_cb FLContext.get_engine.get_clients.token",
    "FLContext.get_engine.job_runner._make_deploy_message FLContext.get_engine.job_runner.lock",
    "FLContext.get_engine.job_runner._pending_client_outcomes.setdefault.add",
    "FLContext.get_engine.job_runner.resolve_client_outcome",
    "FLContext.get_engine.job_runner.running_jobs.get.get_application",
    "FLContext.get_engine.job_runner.running_jobs.get.get_deployment",
    "FLContext.get_engine.job_runner.running_jobs.get.meta",
    "FLContext.get_engine.job_runner.running_jobs.get.resource_spec FLContext.get_engine.new_context",
    "FLContext.get_engine.run_processes.get.items FLContext.get_engine.run_processes.get.values.get_fqcn",
    "FLContext.get_engine.run_processes.get.values.name FLContext.get_engine.run_processes.get.values.token",
    "FLContext.get_engine.server.admin_server.send_requests_and_get_reply_dict.body",
    "FLContext.get_engine.server.admin_server.send_requests_and_get_reply_dict.get_header",
    "FLContext.get_engine.server.admin_server.timeout FLContext.get_engine.server.process_job_failure",
    "FLContext.get_engine.start_client_job FLContext.get_engine.sync_clients_from_main_process",
)
def running_jobs(module: Any) -> None:
    """The engine of the server's own process knows the jobs that run: their processes with their clients by token, the
    jobs themselves, and by job whose word is awaited, which one may be let off. It deploys a job, reserves a client's
    resources (enough or not, and their token or why not) and starts the job there, by messages of its own. A client
    that starts a job replies with a text that does not change. A job's process learns the clients' new tokens."""
    server, context = f"{MODULES}.private.fed.server", module.FLContext()
    runner = import_module(f"{server}.job_runner").JobRunner("folder")
    with runner.lock:
        runner._pending_client_outcomes.setdefault("job", set()).add("hospital-a")
    assert runner.is_client_outcome_pending("job", "hospital-a") and runner.running_jobs == {}
    runner.resolve_client_outcome("job", "hospital-a")
    runner.resolve_client_outcome("another job", "hospital-a")
    assert not runner.is_client_outcome_pending("job", "hospital-a")
    job = import_module(f"{MODULES}.apis.job_def").Job("job", {"hospital-a": {}}, {"app": ["@ALL"]}, {"name": "study"})
    assert (job.get_deployment(), job.meta, job.resource_spec) == (
        *({"app": ["@ALL"]}, {"name": "study"}, {"hospital-a": {}}),
    )
    takes(job.get_application, "app", context)
    takes(runner._make_deploy_message, job, b"app", "app", context)
    engine = import_module(f"{server}.server_engine").ServerEngine
    one = import_module(f"{MODULES}.apis.client").Client("hospital-a", "token")
    silent = SimpleNamespace(
        _make_message_for_check_resource=lambda *asked: "",
        get_client_from_name=lambda name: one,
        _send_admin_requests=lambda *sent: [SimpleNamespace(client_name="hospital-a", reply=None)],
    )
    assert engine.check_client_resources(silent, job, {"hospital-a": {}}, context) == {"hospital-a": (False, "")}
    takes(engine.cancel_client_resources, "self", {"hospital-a": (True, "token")}, {"hospital-a": {}}, context)
    takes(engine.start_client_job, "self", job, {"hospital-a": "dispatch"}, context)
    takes(engine.new_context, "self")
    takes(engine.sync_clients_from_main_process, "self")
    source_holds(engine, "self.run_processes = {}", "self.client_manager = client_manager")
    assert import_module(f"{server}.client_manager").ClientManager().clients == {}
    takes(import_module(f"{server}.fed_server").FederatedServer.process_job_failure, "self", "request")
    admin = import_module(f"{server}.admin").FedAdminServer
    takes(admin.send_requests_and_get_reply_dict, "self", {"token": "order"}, timeout_secs=1.0)
    source_holds(admin, "self.timeout = timeout", "result[r.client_token] = r.reply")
    started = import_module("nvflare_reliability.kit_patches").STARTED
    source_holds(import_module(f"{MODULES}.private.fed.client.client_engine").ClientEngine.start_app, f'"{started}"')


@relies(
    "apis.fl_constant",
    "CellMessageAuthHeaderKey.CLIENT_NAME FLContextKey.CURRENT_RUN",
    "FLContextKey.JOB_BLOCK_REASON RunProcessKey.PARTICIPANTS",
    "FLContextKey.TASK_NAME FLContextKey.WORKSPACE_OBJECT ReservedKey.IDENTITY_NAME ReturnCode.EXECUTION_EXCEPTION",
    "ReturnCode.OK ReturnCode.TASK_ABORTED ReturnCode.TASK_RESULT_FILTER_ERROR ServerCommandNames.GET_TASK",
    "ServerCommandNames.APP_COMMAND ServerCommandNames.SUBMIT_UPDATE",
)
def constants(module: Any) -> None:
    """The four return codes of an answer do not end a job at NVFlare's server; other codes may, and do not pass. The
    server refuses a message whose CLIENT_NAME is not that of its token, before an interceptor sees it. A hospital whose
    JOB_BLOCK_REASON is set says that its resources do not suffice, and why. The clients of a job's process are its
    PARTICIPANTS. The server sends what a person asks of a job's controller on to its process as an APP_COMMAND."""
    runner = import_module(f"{MODULES}.private.fed.server.server_runner").ServerRunner
    code = module.ReturnCode
    passing = {code.OK, code.EXECUTION_EXCEPTION, code.TASK_ABORTED, code.TASK_RESULT_FILTER_ERROR}
    assert len(passing) == 4 and not passing & set(runner.ABORT_RETURN_CODES)
    names = module.ServerCommandNames
    assert len({names.GET_TASK, names.SUBMIT_UPDATE, names.APP_COMMAND}) == 3
    header = module.CellMessageAuthHeaderKey
    signed = {header.CLIENT_NAME: "hospital-a", header.TOKEN: "t", header.TOKEN_SIGNATURE: "of hospital-a"}
    message = import_module(f"{MODULES}.fuel.f3.message").Message
    authenticator = import_module(f"{MODULES}.private.fed.authenticator")
    verifier = SimpleNamespace(verify=lambda name, token, signature: signature == f"of {name}")
    for name, passes in [("hospital-a", True), ("hospital-b", False)]:
        sent = message({**signed, header.CLIENT_NAME: name})
        assert (authenticator.validate_auth_headers(sent, verifier, logging.getLogger()) is None) == passes
    server = import_module(f"{MODULES}.private.fed.server.fed_server").FederatedServer
    source_holds(server, "core_cell.add_incoming_filter(", "cb=self._validate_auth_headers")
    asked = import_module(f"{MODULES}.private.fed.client.scheduler_cmds").CheckResourceProcessor.process
    source_holds(asked, "get_prop(FLContextKey.JOB_BLOCK_REASON)", "token = block_reason")
    engine = import_module(f"{MODULES}.private.fed.server.server_engine").ServerEngine
    source_holds(engine._start_runner_process, "RunProcessKey.PARTICIPANTS: job_clients")
    core = inspect.getsource(import_module(f"{MODULES}.fuel.f3.cellnet.core_cell").CoreCell)
    assert core.index("self.in_filter_reg.find(") < core.index("self.message_interceptor, *")


@relies("apis.job_def", "ALL_SITES JobMetaKey.DEPLOY_MAP.value JobMetaKey.SUBMITTER_NAME.value SERVER_SITE_NAME")
def all_sites(module: Any) -> None:
    """A job for all connected hospitals is deployed to this name, and to the server's, as our meta.json has it, which
    NVFlare completes by who submitted it."""
    assert (module.ALL_SITES, module.SERVER_SITE_NAME) == ("@ALL", "server")
    assert (module.JobMetaKey.DEPLOY_MAP.value, module.JobMetaKey.SUBMITTER_NAME.value) == (
        "deploy_map",
        "submitter_name",
    )


@relies("apis.signal", "Signal.triggered")
def abort_signal(module: Any) -> None:
    """An abort signal is quiet until it is triggered."""


@relies("apis.utils.fl_context_utils", "add_job_audit_event")
def audit(module: Any) -> None:
    """A line goes into the job's audit log; without one, as in a simulation, nothing happens."""


@relies(
    "apis.workspace",
    "Workspace.get_app_config_dir Workspace.get_job_meta_path Workspace.get_root_dir Workspace.get_run_dir",
    "Workspace.get_site_config_dir Workspace.get_startup_kit_dir",
)
def workspace(module: Any) -> None:
    """A kit's certificates and local/ folder, and a job's plan, meta.json and results, lie at these places."""


# ---------------------------------------------------------------------------------------------------- the workflow
@relies("apis.client", "Client.name Client.token")
def client(module: Any) -> None:
    """A client has the hospital's name, its token and the name of its cell, which is the hospital's without a relay."""


@relies("apis.job_scheduler_spec", "DispatchInfo")
def dispatch(module: Any) -> None:
    """A job is started at a client with an app, the resources that it needs, and the token of their reservation."""


@relies("utils.job_launcher_utils", "get_resource_manager_spec")
def resources(module: Any) -> None:
    """A job's needs at a hospital are read from its facts; a hospital that is not named needs nothing."""


@relies("private.fed.utils.fed_utils", "extract_participants.upper")
def participants(module: Any) -> None:
    """The names in a part of a job's deploy_map, in each of the forms that NVFlare takes."""


@relies("fuel.common.exit_codes", "ProcessExitCode.EXCEPTION")
def exit_codes(module: Any) -> None:
    """A client reports a job's process that died with this code, while the job ran and nobody had aborted it."""
    executor = import_module(f"{MODULES}.private.fed.client.client_executor").JobExecutor
    source_holds(executor._wait_child_process_finish, "return_code = ProcessExitCode.EXCEPTION", "not abort_requested")
    own = module.ProcessExitCode
    assert own.EXCEPTION not in (own.UNSAFE_COMPONENT, own.CONFIG_ERROR, own.INFRASTRUCTURE_ERROR, 0)


@relies("private.defs", "CellMessageHeaderKeys.TOKEN JobFailureMsgKey.CODE JobFailureMsgKey.JOB_ID")
def failure_reports(module: Any) -> None:
    """A client's report that a job's process ended names the job and the code; the client's token is a header."""
    keys = import_module(f"{MODULES}.apis.fl_constant").CellMessageAuthHeaderKey
    assert module.CellMessageHeaderKeys.TOKEN == keys.TOKEN
    executor = import_module(f"{MODULES}.private.fed.client.client_executor").JobExecutor
    said = "JobFailureMsgKey.JOB_ID: job_id", "JobFailureMsgKey.CODE: return_code"
    source_holds(executor._wait_child_process_finish, *said, "topic=CellChannelTopic.REPORT_JOB_FAILURE")


@relies("private.admin_defs", "MsgHeader.RETURN_CODE ReturnCode.OK")
def orders(module: Any) -> None:
    """A reply to the server's order has a body; without a return code, it is one of success."""


@relies(
    "fuel.sec.audit",
    "AuditService.get_auditor._lock AuditService.get_auditor.audit_file.close",
    "AuditService.get_auditor.audit_file.name",
)
def audit_log(module: Any) -> None:
    """A process has one auditor or none. It writes lines to its file and flushes each, under a lock, and another that
    has write, flush and close may take the file's place."""


@relies(
    "apis.controller_spec",
    "ClientTask.client.name ClientTask.result ClientTask.task.data SendOrder.SEQUENTIAL Task.client_tasks",
    "Task.completion_status TaskCompletionStatus.CANCELLED TaskCompletionStatus.CLIENT_DEAD",
)
def tasks(module: Any) -> None:
    """A task has data, a time limit and three callbacks, keeps its deliveries in a list that may be replaced, and has
    no completion status while it stands. A delivery names its task and its client, and gets the result."""


@relies(
    "apis.impl.controller",
    "Controller.__init__ Controller.control_flow Controller.start_controller",
    "Controller.stop_controller Controller.process_result_of_unknown_task Controller.log_error",
    "Controller.log_exception Controller.log_info Controller.log_warning Controller.system_panic Controller.send",
    "Controller.cancel_task Controller.get_client_disconnect_time",
)
def controller(module: Any) -> None:
    """A workflow runs control_flow between start_controller and stop_controller, sends a task to one named site, takes
    tasks back, and is told of answers that come too late. tests/federation/test_transport.py runs NVFlare's own."""


@relies(
    "apis.executor",
    "Executor.__init__ Executor.execute Executor.handle_event Executor.log_error Executor.log_warning",
)
def executor(module: Any) -> None:
    """A hospital's executor is told events and executes tasks, with a signal that says when the job is aborted."""


@relies("apis.filter", "Filter.__init__ Filter.process")
def filters(module: Any) -> None:
    """A filter of privacy.json is given each answer and returns what leaves."""


@relies(
    "apis.fl_component",
    "FLComponent.__init__ FLComponent.handle_event FLComponent.log_critical FLComponent.log_error",
)
def component(module: Any) -> None:
    """A component of a job or a kit is told all events, and writes to the log."""


@relies(
    "apis.event_type",
    "EventType.START_RUN EventType.END_RUN EventType.SYSTEM_START EventType.JOB_ABORTED EventType.JOB_COMPLETED",
    "EventType.BEFORE_CHECK_RESOURCE_MANAGER EventType.CLIENT_HEARTBEAT_PROCESSED",
)
def events(module: Any) -> None:
    """A job's start and end, and the start of a server, are events of their own. A hospital's parent process is told
    that a job is over, whatever its end, when its process is gone, and that a job asks for its resources, before it is
    answered. The server's own process is told of each heartbeat of a client."""
    kinds = module.EventType
    assert len({kinds.START_RUN, kinds.END_RUN, kinds.SYSTEM_START, kinds.JOB_COMPLETED}) == 4
    executor = import_module(f"{MODULES}.private.fed.client.client_executor").JobExecutor
    source_holds(executor._wait_child_process_finish, "job_handle.wait()", "fire_event(EventType.JOB_COMPLETED")
    asked = import_module(f"{MODULES}.private.fed.client.scheduler_cmds").CheckResourceProcessor.process
    source_holds(asked, "fire_event(EventType.BEFORE_CHECK_RESOURCE_MANAGER")
    server = import_module(f"{MODULES}.private.fed.server.fed_server").FederatedServer
    source_holds(server.client_heartbeat, "fire_event(EventType.CLIENT_HEARTBEAT_PROCESSED")


@relies(
    "apis.event_type",
    "EventType.AFTER_CLIENT_HEARTBEAT EventType.AFTER_CLIENT_REGISTER EventType.CLIENT_REGISTER_PROCESSED",
    "EventType.SUBMIT_JOB",
)
def events_of_kits(module: Any) -> None:
    """The server's own process is told of each client that asked to be let in, and of each job before it is taken, and
    refuses one whose JOB_BLOCK_REASON is set. A hospital's is told when it is let in, and after each heartbeat."""
    server = import_module(f"{MODULES}.private.fed.server.fed_server").FederatedServer
    source_holds(server.register_client, "fire_event(EventType.CLIENT_REGISTER_PROCESSED")
    commands = import_module(f"{MODULES}.private.fed.server.job_cmds").JobCommandModule
    source_holds(commands.submit_job, "fire_event(EventType.SUBMIT_JOB", "get_prop(FLContextKey.JOB_BLOCK_REASON)")
    source_holds(import_module(f"{MODULES}.private.fed.app.client.client_train"), "EventType.AFTER_CLIENT_REGISTER")
    source_holds(import_module(f"{MODULES}.private.fed.client.communicator"), "EventType.AFTER_CLIENT_HEARTBEAT")
    assert module.EventType.SUBMIT_JOB != module.EventType.JOB_COMPLETED


@relies(
    "apis.fl_constant",
    "FLContextKey.EVENT_DATA FLContextKey.JOB_META FLContextKey.UNAUTHENTICATED SystemComponents.JOB_MANAGER",
)
def facts_of_events(module: Any) -> None:
    """A job's end has its id as data, a job that comes in its meta, and a client that is not let in the reason."""
    runner = import_module(f"{MODULES}.private.fed.server.job_runner").JobRunner
    source_holds(runner._fire_job_lifecycle_event, "FLContextKey.EVENT_DATA", "JobMetaKey.JOB_ID.value: job_id")
    commands = import_module(f"{MODULES}.private.fed.server.job_cmds").JobCommandModule
    source_holds(commands.submit_job, "set_prop(FLContextKey.JOB_META, meta")
    clients = import_module(f"{MODULES}.private.fed.server.client_manager")
    source_holds(clients, "FLContextKey.UNAUTHENTICATED")
    assert module.SystemComponents.JOB_MANAGER == "job_manager"


@relies("apis.fl_context", "FLContext.get_prop.get")
def jobs_of_the_server(module: Any) -> None:
    """The server's engine has its components by name, and its job manager the meta of each job."""
    manager = import_module(f"{MODULES}.apis.impl.job_def_manager").SimpleJobDefManager
    takes(manager.get_job, "self", "job", "context")
    takes(
        import_module(f"{MODULES}.private.fed.server.server_engine").ServerEngine.get_component, "self", "job_manager"
    )


@relies("apis.job_def_manager_spec", "JobDefManagerSpec")
def the_servers_books(module: Any) -> None:
    """The job manager tells all jobs and those in some states, and makes a copy of one with a meta that it is given."""
    manager = import_module(f"{MODULES}.apis.impl.job_def_manager").SimpleJobDefManager
    assert issubclass(manager, module.JobDefManagerSpec)
    takes(manager.get_all_jobs, "self", "context")
    takes(manager.get_jobs_by_status, "self", ["FINISHED:ABNORMAL"], "context")
    takes(manager.clone, "self", "job", {"name": "study"}, "context")
    source_holds(manager.clone, "new_job_id()", "JobMetaKey.STATUS.value] = RunStatus.SUBMITTED.value", "SUBMIT_TIME")


@relies(
    "apis.job_def",
    "Job.job_id Job.meta JobMetaKey.CLONED_FROM.value JobMetaKey.JOB_CLIENTS JobMetaKey.JOB_DEPLOY_DETAIL",
    "JobMetaKey.JOB_ID JobMetaKey.LAST_SCHEDULE_TIME JobMetaKey.SCHEDULE_COUNT JobMetaKey.SCHEDULE_HISTORY",
    "JobMetaKey.STATUS.value JobMetaKey.SUBMIT_TIME.value RunStatus.ABANDONED RunStatus.FAILED_TO_RUN",
    "RunStatus.FINISHED_ABNORMAL RunStatus.FINISHED_COMPLETED RunStatus.FINISHED_EXECUTION_EXCEPTION",
)
def how_jobs_end(module: Any) -> None:
    """A job has an id and a meta, in which its state is a text that begins with FINISHED when it is over."""


# ---------------------------------------------------------------------------------------------------- bytes
@relies("app_opt.pt.decomposers", "TensorDecomposer.download TensorDecomposer.to_downloadable")
def decomposer(module: Any) -> None:
    """Tensors travel as they are, and no pickle is used for them. One call makes them ready, with the largest size of a
    piece; another fetches them, and gives an error or the tensors."""


@relies("fuel.f3.streaming.cacheable", "ItemConsumer.__init__ ItemConsumer.consume_items")
def fetching(module: Any) -> None:
    """A function of ours gets what is fetched as it comes, a list in each reply, and the next reply is asked for
    meanwhile; what went wrong is noted."""


@relies("fuel.utils.fobs.datum", "Datum.blob_datum")
def bytes_beside(module: Any) -> None:
    """Bytes that are wrapped go beside a message's body from where they lie, and come back as bytes in such a wrap."""


@relies(
    "app_opt.pt.tensor_downloader", "TensorDownloadable.__init__ TensorDownloadable.produce TensorDownloadable.release"
)
def pieces(module: Any) -> None:
    """Each call gives one or several whole tensors and the state for the next, and the last one says that it is. What
    is released holds no tensors any more."""


@relies("fuel.utils.fobs.fobs", "_decomposers _dot_handlers.update")
def fobs(module: Any) -> None:
    """Decomposers are kept by their class's name, and handlers by the number of their part of a message."""


@relies("fuel.utils.class_loader", "get_class_name")
def class_names(module: Any) -> None:
    """A class's name has its module's before it."""


@relies("fuel.utils.fobs", "dots.TENSOR_DOWNLOAD dots.NUMPY_DOWNLOAD")
def dots(module: Any) -> None:
    """Sections of a message that say where tensors or arrays are fetched from have numbers of their own."""


@relies(
    "fuel.utils.fobs.lobs",
    "DATUM_ID_LEN HEADER_LEN HEADER_STRUCT MARKER_MAIN MARKER_DATUM_TEXT MARKER_DATUM_BLOB",
)
def sections(module: Any) -> None:
    """A message is sections, each with a marker, a kind and its size in front; the first is the body (msgpack)."""


@relies("fuel.utils.buffer_list", "BufferList.get_size BufferList.read_bytes")
def buffers(module: Any) -> None:
    """Bytes that came in pieces can be read across the pieces' borders."""


# ---------------------------------------------------------------------------------------------------- the cell
@relies(
    "fuel.f3.cellnet.cell",
    "Cell._process_reply Cell.byte_receiver.registry.find.cb.__self__.blob_cb Cell.byte_receiver.registry.reg.values",
    "Cell.byte_streamer.chunk_size Cell.byte_streamer.send",
    "?Cell.get_fqcn.rpartition Cell.core_cell.asked_to_stop Cell.core_cell.set_message_interceptor",
    "Cell.get_fobs_context",
    "?Cell.fire_and_forget Cell.register_stream_cb",
    "Cell.requests_dict.get.in_receiving.set Cell.requests_dict.get.result Cell.requests_dict.get.stream_error",
    "Cell.requests_dict.get.receiving_future.get_progress Cell.send_blob",
    "?Cell.broadcast_multi_requests ?Cell.send_request.get_header ?Cell.send_request.payload.items",
)
def cell(module: Any) -> None:
    """A handler that is registered later takes the place of the one before. The registry finds the handler of a channel
    and topic; its BlobHandler has blob_cb, which can be called with a message that was read already. An interceptor
    sees each request first. A request that waits is in requests_dict and ends when it has a result. There is no public
    way to bound a message's size by what the study needs: tests/federation/test_gate.py shows the whole. All requests
    go through send_request, by keywords, and another function may take its place, as one may of send_blob, by which all
    replies go; what has come of a reply is its receiving_future's progress. A cell says which others it is
    connected to, as it says all that its core does."""
    found = module.Cell("medsilo-contract", "tcp://127.0.0.1:1", secure=False, credentials={})
    try:
        assert callable(found._process_reply) and isinstance(found.requests_dict, dict)
        takes(found._send_request, channel="c", target="t", topic="t", request=None, timeout=1.0, abort_signal=None)
        assert callable(found.send_request)
        found.send_request = found.broadcast_multi_requests = print
        assert found.send_request is print and found.broadcast_multi_requests is print
        source_holds(module.Cell, "waiter.receiving_future = future")
        source_holds(module.Adapter, "self.cell.send_blob(")
        heard: list[Any] = []
        found.register_request_cb(channel="server_command", topic="*", cb=heard.append)
        handler = found.byte_receiver.registry.find("server_command", "submit_update").cb.__self__
        assert callable(handler.blob_cb) and handler.max_blob_size is not None
        found.register_stream_cb("server_command", "submit_update", heard.append)
        assert found.byte_receiver.registry.find("server_command", "submit_update").cb == heard.append
        assert len(found.byte_receiver.registry.reg) >= 2
        assert found.byte_streamer.chunk_size == found.byte_streamer.get_chunk_size() == 1 << 20
        found.core_cell.set_message_interceptor(lambda message: None)
        assert found.get_fqcn() == "medsilo-contract"
        assert [found.is_cell_connected(name) for name in ("medsilo-contract", "hospital-a")] == [True, False]
        found.core_cell.agents["hospital-a"] = "connected"
        assert found.is_cell_connected("hospital-a")
        assert found.get_fobs_context({"a": 1})["a"] == 1 and "a" not in found.get_fobs_context()
        source_holds(module.Cell._process_stream_error, "waiter.stream_error", "waiter.result", "in_receiving.set()")
    finally:
        core = import_module(f"{MODULES}.fuel.f3.cellnet.core_cell").CoreCell
        core.ALL_CELLS.pop("medsilo-contract", None)


@relies(
    "fuel.f3.cellnet.defs",
    "CellChannel.RETURN_ONLY CellChannel.SERVER_COMMAND CellChannel.SERVER_MAIN",
    "CellChannelTopic.REPORT_JOB_FAILURE ReturnCode.OK Encoding.FOBS MessageHeaderKey.CHANNEL",
    "MessageHeaderKey.DESTINATION MessageHeaderKey.ORIGIN MessageHeaderKey.RETURN_CODE MessageHeaderKey.TOPIC",
    "ReturnCode.COMM_ERROR ReturnCode.INVALID_REQUEST ReturnCode.MSG_TOO_BIG ReturnCode.SERVICE_UNAVAILABLE",
    "ReturnCode.TARGET_UNREACHABLE ReturnCode.TIMEOUT",
)
def cell_constants(module: Any) -> None:
    """Tasks and answers go over one channel, replies over another. A reply's code tells a line that is down from a
    request that is refused. The server's own process takes reports of ended jobs over its main channel."""
    server = import_module(f"{MODULES}.private.fed.server.fed_server")
    source_holds(server, "topic=CellChannelTopic.REPORT_JOB_FAILURE,\n            cb=self.process_job_failure")
    assert module.CellChannel.RETURN_ONLY != module.CellChannel.SERVER_COMMAND
    codes = module.ReturnCode
    down = {codes.TIMEOUT, codes.COMM_ERROR, codes.TARGET_UNREACHABLE}
    assert len(down | {codes.MSG_TOO_BIG, codes.SERVICE_UNAVAILABLE, codes.INVALID_REQUEST, codes.OK}) == 7


@relies("fuel.f3.cellnet.fqcn", "FqcnInfo.is_on_server FQCN.ROOT_SERVER FQCN.join")
def names_of_cells(module: Any) -> None:
    """The server and its jobs are on the server by their names, hospitals are not. A job's cell is named below that of
    the party where it runs."""


@relies("fuel.f3.cellnet.utils", "decode_payload make_reply new_cell_message")
def cell_utils(module: Any) -> None:
    """A payload is decoded in place, by the encoding that a header of our choice names; a reply has a code and a
    body, a request headers and a payload."""


@relies("fuel.f3.message", "Message.get_header Message.headers Message.set_header Message.payload")
def message(module: Any) -> None:
    """A message has headers, in a dictionary, and a payload."""


@relies("fuel.f3.streaming.blob_streamer", "BlobHandler.handle_blob_cb BlobHandler.max_blob_size")
def blobs(module: Any) -> None:
    """A stream that announces more than max_blob_size is refused before any memory is taken for it."""


@relies(
    "fuel.f3.streaming.download_service",
    "DownloadStatus.SUCCESS OBJ_DOWNLOADER_CHANNEL OBJ_DOWNLOADER_TOPIC ProduceRC.EOF ProduceRC.OK _PropKey.CANCEL",
    "_PropKey.CONFIRM _PropKey.CONFIRM_EXPECTED _PropKey.CONFIRM_NONCE _PropKey.REF_ID _PropKey.STATE _PropKey.STATUS",
    "download_object",
)
def downloads(module: Any) -> None:
    """Tensors are fetched over this channel and topic, until a reply says that there are no more. A request names the
    tensors and holds the state that came with the piece before, unchanged; the reply holds the next state. The word
    that there are no more may ask for a confirmation, by which the sender knows that it can drop them."""


@relies(
    "fuel.f3.streaming.stream_const",
    "STREAM_CHANNEL STREAM_DATA_TOPIC StreamHeaderKey.CHANNEL StreamHeaderKey.ERROR_MSG StreamHeaderKey.ERROR_TYPE",
    "StreamHeaderKey.PAYLOAD_ENCODING StreamHeaderKey.RETRY_TIMEOUT StreamHeaderKey.RETRY_WAIT",
    "StreamHeaderKey.STREAM_ID StreamHeaderKey.STREAM_REQ_ID StreamHeaderKey.TOPIC",
)
def stream_constants(module: Any) -> None:
    """A piece of a stream says in its headers which stream, channel and topic, request and error it belongs to, and
    how long its sender would like the stream to be kept."""


@relies(
    "fuel.f3.streaming.byte_receiver",
    "RxTask._remove_task RxTask.chunks RxTask.cleanup_timer RxTask.completed RxTask.completed_task_ttl RxTask.failed",
    "RxTask.find_or_create_task RxTask.headers RxTask.map_lock RxTask.out_seq_chunks.values RxTask.rx_task_map.get",
    "RxTask.rx_task_map.values.stop RxTask.stop",
)
def received_streams(module: Any) -> None:
    """A stream that comes in has a task, in one map by origin and number, from its first message on; pieces wait in
    chunks, and in out_seq_chunks before their turn. Without the sender's two wishes it is kept, when it has
    completed, for as long as our own configuration says, by a thread, unless it has a timer already; _remove_task
    ends that at once. There is no public way to it."""


@relies(
    "fuel.f3.streaming.stream_types",
    "BlobSizeError.__name__ Stream.get_headers Stream.get_size ?Stream.task.stop StreamError.__name__",
    "StreamFuture.add_done_callback StreamFuture.error StreamFuture.get_size StreamFuture.headers StreamFuture.result",
)
def streams(module: Any) -> None:
    """A stream announces its size and headers; its future calls back when it is done, and has its error or result. The
    error for a size is one of streams, and the sender is told its class's name. A received stream has its task."""


# ---------------------------------------------------------------------------------------------------- from outside
@relies(
    "fuel.flare_api.api_spec",
    "AuthenticationError AuthorizationError InternalError InvalidTarget JobNotFound JobNotRunning",
    "MonitorReturnCode.TIMEOUT NoConnection NoReply SessionClosed",
    "SystemInfo.client_info.last_connect_time SystemInfo.client_info.name",
)
def session_words(module: Any) -> None:
    """Each kind of failure is an exception of its own; a system's facts say since when it is up, and when each client
    was heard last."""


@relies("apis.fl_exception", "FLCommunicationError")
def late_answers(module: Any) -> None:
    """A session whose server answers too late raises it, where it does not say that there is no connection."""
    authenticator = import_module(f"{MODULES}.private.fed.authenticator")
    source_holds(authenticator, 'FLCommunicationError(f"failed to challenge server')
    source_holds(import_module(f"{MODULES}.fuel.flare_api.flare_api"), "except FLCommunicationError as e")
    assert issubclass(module.FLCommunicationError, Exception)


@relies("fuel.hci.proto", "MetaKey.STATUS MetaStatusValue.NO_REPLY")
def replies_of_clients(module: Any) -> None:
    """A client that does not answer the server's question for its jobs is told of with this status."""
    commands = import_module(f"{MODULES}.private.fed.server.training_cmds")
    source_holds(commands, "MetaKey.STATUS: MetaStatusValue.NO_REPLY")
    assert module.MetaStatusValue.NO_REPLY != module.MetaStatusValue.OK


@relies("fuel.utils.config_service", "ConfigService.initialize")
def places_of_files(module: Any) -> None:
    """Where no folder was named, NVFlare looks for files of its own in all below the current one."""
    takes(module.ConfigService.initialize, {}, ["kit/startup"])
    search = import_module(f"{MODULES}.fuel.utils.config_factory").ConfigFactory.search_config_format
    source_holds(search, "if not search_dirs", "os.walk(search_dir)")


@relies("fuel.f3.drivers.tcp_driver", "TcpDriver.__name__")
@relies("fuel.f3.communicator", "driver_mgr.class_cache.add driver_mgr.register driver_loaded")
def drivers(module: Any) -> None:
    """Drivers are loaded before a connection is made, unless driver_loaded is set; one that has its name in class_cache
    is registered, and not once more."""


@relies(
    "fuel.flare_api.flare_api",
    "Session.abort_job Session.clone_job Session.close Session.do_app_command Session.download_job_result",
    "Session.get_job_meta Session.get_job_status Session.get_system_info.client_info.name",
    "Session.api.cell.core_cell.communicator.stop Session.api.scheme Session.get_system_info.server_info.start_time",
    "Session.list_jobs.get",
    "Session.monitor_job Session.submit_job Session.try_connect Session.get_client_job_status.get",
)
def session(module: Any) -> None:
    """The lead's commands over mutual TLS. tests/secure/test_lead.py runs each against a real server."""
    own = module.Session
    takes(own.__init__, "self", username="lead", startup_path="kit")
    takes(own.try_connect, "self", 10.0)
    source_holds(import_module(f"{MODULES}.fuel.hci.client.api").AdminAPI, "self.cell = ")
    source_holds(import_module(f"{MODULES}.fuel.f3.cellnet.core_cell").CoreCell, "self.communicator = ")
    for asks in (own.abort_job, own.clone_job, own.get_job_meta, own.get_job_status, own.submit_job):
        takes(asks, "self", "job")
    takes(own.download_job_result, "self", "job", "folder")
    takes(own.monitor_job, "self", "job", 120.0, 1.0)
    takes(own.do_app_command, "self", "job", "topic", {"after": 1})
    takes(own.list_jobs, "self", detailed=True, reverse=True, limit=20)
    takes(own.get_system_info, "self")
    takes(own.get_client_job_status, "self", ["hospital-a"])
    assert own.get_client_job_status(SimpleNamespace(_do_command=lambda text: {"meta": {}}), ["hospital-a"]) is None


@relies(
    "private.fed.app.simulator.simulator_runner",
    "?SimulatorRunner.args.set ?SimulatorRunner.client_config SimulatorRunner.client_run",
    "?SimulatorRunner.deploy_args ?SimulatorRunner.build_ctx SimulatorRunner.run SimulatorRunner.setup",
    "SimulatorClientRunner.do_one_task",
)
def simulator(module: Any) -> None:
    """The simulator, in this process: its command is deprecated, and SimEnv starts another process with a command line
    that is split at spaces, so that no folder may have one. It starts each site's process by sys.executable, and takes
    its patience with them from settings that its SimulatorClientRunner reads, which client_run makes and runs. That
    finds a port for a process, connects to whoever listens there, and returns no next client when it has lost it."""
    takes(module.SimulatorRunner, "job", "workspace", clients="a,b", threads=2, max_clients=2)
    found = module.SimulatorRunner("job", "workspace", clients="a,b", threads=2)
    takes(found.client_run, "folder", ["a"], None)
    source_holds(
        module.SimulatorRunner.client_run,
        "SimulatorClientRunner(",
        "server_custom_folder, self.args, clients, self.client_config, self.deploy_args, self.build_ctx",
        ".run(gpu)",
    )
    source_holds(module, "args.set", "sys.executable")
    task = module.SimulatorClientRunner.do_one_task
    source_holds(task, "get_open_ports(1)[0]", "return True, None, client.client_name")
    takes(module.SimulatorClientRunner, "folder", "args", ["a"], "config", "args", {})


# ---------------------------------------------------------------------------------------------------- provisioning
@relies("lighter.constants", "CtxKey.BUILD_ERROR CtxKey.CURRENT_PROD_DIR ProvFileName.SIGNATURE_JSON")
def provision_constants(module: Any) -> None:
    """A context says whether kits were made and where; the file with their signatures has this name."""


@relies("lighter.prov_utils", "prepare_builders")
def builders(module: Any) -> None:
    """The builders of a project file, among them the four that make our kits."""


@relies("lighter.provision", "prepare_project")
def project(module: Any) -> None:
    """A project file's participants become a project, which is then provisioned."""


@relies("lighter.provisioner", "Provisioner.provision.get Provisioner.provision.get_state_dir")
def provisioner(module: Any) -> None:
    """Kits are made under a folder, with the root kept as state; the context says where."""


@relies("lighter.utils", "load_private_key sign_folders")
def signing(module: Any) -> None:
    """A folder's files are signed with the root's key into one file, which a kit checks when it starts."""


# ---------------------------------------------------------------------------------------------------- texts
@dataclass(frozen=True)
class Key:
    """A text that NVFlare reads from a file of ours, or that we read from one of its."""

    text: str
    means: str


KEYS = (
    # meta.json and the configurations of a job (flare/jobs.py)
    Key("min_clients", "the job waits for so many hospitals"),
    Key("resource_spec", "what the job asks of a hospital's resource manager: nothing"),
    Key("deploy_map", "which parties get the job's app"),
    Key("format_version", "2: components have paths and arguments"),
    Key("task_data_filters", "filters of a job: none"),
    Key("task_result_filters", "filters of a job: none"),
    Key("components", "what a job or a kit has beside its workflow"),
    Key("workflows", "the controller"),
    Key("executors", "the executor, for tasks of all names"),
    Key("tasks", "the names of tasks that an executor takes; `*` for all"),
    Key("executor", "the class of an executor, and its arguments"),
    Key("path", "the class of a component"),
    Key("args", "the arguments of a component"),
    Key("server", "the server's own settings in its configuration"),
    Key("task_request_interval", "seconds between a hospital's questions for work; by default 2"),
    Key("download_chunk_size", "with tensor_ before it: bytes of tensors that are asked for at once"),
    Key("streaming_idle_timeout", "seconds that tensors are held ready for who does not ask for their next piece"),
    Key("max_runner_sync_timeout", "seconds in which a job's process at a site has to reach the server's"),
    Key("dead_client_grace_period", "seconds from the belief that a site is dead until it is lost"),
    Key("scope", "the privacy scope that a job asks for"),
    Key("launcher_spec", "left out of a clone"),
    Key("custom_props", "what a job says of itself beside NVFlare's own keys"),
    # a kit's local/resources.json (site_configs, consortium/provision.py)
    Key("class_list_enforcement_mode", "enforce: only listed classes are made from a job"),
    Key("class_allow_list", "classes that a job may name; ours are added"),
    Key("allow_log_streaming", "false: no log leaves a hospital"),
    Key("snapshot_persistor", "where a server keeps snapshots"),
    Key("job_manager", "where a server keeps jobs"),
    # a job's facts, as the server tells them (consortium/lead.py, flare/workspace.py)
    Key("submitter_name", "who submitted, as NVFlare authenticated them"),
    Key("cloned_from", "the job that this is a clone of"),
    Key("schedule_history", "why a job waits"),
    Key("job_deploy_detail", "why a job could not start"),
    Key("submit_time", "when it was submitted"),
    Key("submit_time_iso", "the same, for people"),
    Key("FINISHED:COMPLETED", "a job whose workflow ended well"),
    # files of a kit, and what the container's entry point calls
    Key("fed_admin.json", "a person's kit has it"),
    Key("fed_client.json", "a hospital's kit has it"),
    Key("fed_server.json", "a server's kit has it"),
    Key("fed_relay.json", "a relay's kit has it"),
    Key("relay__resources.json", "where the relay is that a hospital is behind, in its kit's local/"),
    Key("comm_config.json", "where a relay listens, in its kit's local/"),
    Key("listening_host", "of a relay in a project file: under which address others reach it"),
    Key("connect_to", "of a participant in a project file: who it connects to"),
    Key("resources.json.default", "what a kit's resources are without ours"),
    Key("authorization.json.default", "who may do what, without ours"),
    Key("client.crt", "a hospital's certificate"),
    Key("client.key", "its key"),
    Key("rootCA.pem", "the consortium's root"),
    Key("sub_start.sh", "runs a kit in the foreground"),
    Key("--once", "of sub_start.sh: not again when it ends"),
    Key("--config", "of `nvflare deploy prepare`"),
    Key("--output", "of `nvflare deploy prepare`"),
)
# Classes that files of ours name.
PATHS = (
    "app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
    "app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
    "app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
    "app_common.logging.job_log_streamer.JobLogStreamer",
    "app_common.logging.site_log_streamer.SiteLogStreamer",
    "lighter.impl.workspace.WorkspaceBuilder",
    "lighter.impl.static_file.StaticFileBuilder",
    "lighter.impl.cert.CertBuilder",
    "lighter.impl.signature.SignatureBuilder",
)


def texts_of_nvflare() -> str:
    """Return all that NVFlare's files say, but its own list of licences."""
    root = Path(str(import_module(MODULES).__file__)).parent
    files = (path for path in root.rglob("*") if path.suffix in {".py", ".yml", ".sh", ".json", ".default"})
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(files))


def lost_keys(said: str) -> Iterator[str]:
    """Yield the keys that stand nowhere any more."""
    for key in KEYS:
        if not re.search(rf"(?<![\w.]){re.escape(key.text)}(?![\w])", said) and key.text.partition(":")[0] not in said:
            yield f"{key.text!r} is gone; we rely on it: {key.means}"


def main() -> int:
    """Say what does not hold of the NVFlare that is installed, a line each; 1 when there is something."""
    broken = 0
    for contract in CONTRACTS:
        try:
            contract.check()
        except pytest.skip.Exception:
            continue
        except Exception as error:  # whatever a changed NVFlare raises
            broken += 1
            print(f"{contract.module}: {type(error).__name__}: {' '.join(str(error).split())}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
