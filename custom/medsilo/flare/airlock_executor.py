"""Run the training script of a job in an isolated process, the hospital's airlock.

Before a received job runs, it is converted. The job's code moves to a folder outside Python's path, so that NVFlare's
process for the job does not load the code. The conversion replaces the whole configuration of the job, except for the
script's name and arguments.
"""

import json
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from pydantic import Field

from medsilo.airlock.room import Script
from medsilo.airlock.site import ScriptRoom
from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.files import read_bounded, write_json
from medsilo.core.section import Section
from medsilo.core.yaml_text import LARGEST_YAML
from medsilo.federation.file_supply import SuppliedSite
from medsilo.federation.permission import Permission
from medsilo.federation.site_context import Site, SiteContext
from medsilo.flare.executor import MedsiloExecutor
from medsilo.flare.script_process import guard, take_next
from medsilo.flare.timeouts import timeouts_of
from medsilo.flare.wire import let_tensors_travel
from medsilo.flare.workspace import brings_code, file_of_job, kit_of, settings_folder
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.site.job_code import BROUGHT, CUSTOM, as_brought
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings
from nvflare_reliability.timeouts import limits

EXECUTOR = "medsilo.flare.airlock_executor.AirlockExecutor"
CONFIG = "config_fed_client.json"
DESCRIBED = "script.json"  # in the plan's folder, the name of the file with the script's command
WEIGHTS = ".safetensors"
Argument = Annotated[str, Field(max_length=10_000)]


class ScriptStart(Section):
    """The command that starts a job's script; the file `script.json` contains this command."""

    file: Annotated[
        str, Field(max_length=200, pattern=r"^\w([\w /-]|\.\w)*\.py$")
    ]  # the script's path, relative to the folder of the job's code
    arguments: Annotated[tuple[Argument, ...], Field(max_length=1000)] = ()
    command: Annotated[tuple[Argument, ...], Field(min_length=1, max_length=100)] = ("python3", "-u")

    @classmethod
    def of(cls, message: dict[str, Any]) -> "ScriptStart":
        """Return the script's command from the arguments that the job's configuration gives NVFlare's script executor.

        Raises Refused if the arguments do not name a valid script.
        """
        try:
            if script := message.get("task_script_path"):
                return cls(file=script, arguments=words_of(message.get("task_script_args") or ""))
            words = words_of(message.get("command") or "")
            place = next(n for n, word in enumerate(words) if word.startswith(f"{CUSTOM}/"))
            return cls(
                file=words[place].removeprefix(f"{CUSTOM}/"),
                arguments=words[place + 1 :],
                command=words[:place],
            )
        except (ValueError, TypeError, StopIteration) as error:
            raise Refused("the job does not name its script, or the script's name has odd characters") from error


def words_of(reply: Any) -> tuple[str, ...]:
    """Split a command line into words in the way in which NVFlare splits it.

    >>> words_of("--epochs 2")
    ('--epochs', '2')
    """
    return tuple(map(str, reply)) if isinstance(reply, list | tuple) else tuple(shlex.split(str(reply)))


class AirlockExecutor(MedsiloExecutor):
    """Passes the server's messages to a training script in an isolated process, and sends the script's answers."""

    room: ScriptRoom | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.END_RUN and self.room:
            self.room.close()
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            let_tensors_travel(plainly=True)

    def _guard(self, fl_ctx: FLContext) -> None:
        guard(fl_ctx.get_engine().get_cell(), file_of_job(fl_ctx, paths.PLAN))
        with suppress(Exception):  # the site's answer to the request "join" reports faults of the plan
            self.plan = load_plan(file_of_job(fl_ctx, paths.PLAN))
            self.measured = self.plan.participation.limit is None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        with suppress(AttributeError):
            take_next(self.plan)
        return super().execute(task_name, shareable, fl_ctx, abort_signal)

    def _settings(self, fl_ctx: FLContext) -> SiteSettings:
        settings = super()._settings(fl_ctx)
        local = settings_folder(fl_ctx)
        named = (local / FILE_NAME, local / fl_ctx.get_identity_name() / FILE_NAME)
        # a simulation has no patients who need protection, so no airlock is needed
        if kit_of(fl_ctx) is None and not any(map(Path.is_file, named)):
            return settings.changed({"public_data": True}, FILE_NAME)
        return settings

    def _answering(self, context: SiteContext, permission: Permission, fl_ctx: FLContext) -> Site:
        config = file_of_job(fl_ctx, CONFIG).parent
        let_in = brings_code(fl_ctx) and (config.parent / BROUGHT).is_dir() and context.settings.airlock != "off"
        if context.kit and not let_in:
            raise Refused("this hospital's launcher has not prepared the job's script for the airlock")
        app = as_brought(config.parent)
        own = start_of(app / "config")
        script = Script(app / CUSTOM, own.file, own.arguments, own.command)
        room = self.room = ScriptRoom(context, script, fl_ctx.get_job_id())
        permission.inner = SuppliedSite(context, lambda: room)
        return permission


class AirlockLauncher(ClientProcessJobLauncher):
    """Converts a job before NVFlare starts the job's process. After the conversion, the job's process runs the script
    in an isolated process.
    """

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        take_code_away(Path(workspace.get_app_config_dir(job_meta.get(JobConstants.JOB_ID))))
        return super().launch_job(job_meta, fl_ctx)


def take_code_away(config: Path) -> None:
    """Convert a deployed app so that its script runs in an isolated process.

    All files of the job, including filters and logging configurations, move to a folder from which NVFlare's process
    loads no code. Raises Refused if the job has no script or no plan.

    Args:
        config: The app's folder `config`.
    """
    app = config.parent
    # after a restart of the job's process, the folder with the job's code has already moved
    if (app / CUSTOM).exists():
        if any(path.is_symlink() for path in app.rglob("*")):
            raise Refused("the job contains symbolic links")
        start_of(config)
        aside = app.with_name(f"{app.name}.brought")
        shutil.rmtree(aside, ignore_errors=True)
        app.rename(aside)
        app.mkdir()
        aside.rename(app / BROUGHT)
        config.mkdir()
        for path in sorted((app / BROUGHT / config.name).iterdir()):
            if path.name == paths.PLAN or (path.is_file() and path.suffix == WEIGHTS):
                shutil.copyfile(path, config / path.name)
    write_json(config / CONFIG, site_configuration(config / paths.PLAN))


def start_of(config: Path) -> ScriptStart:
    """Return the command of a job's script from the job's configuration. Raises Refused if the configuration has no
    valid command.
    """
    try:
        if (config / DESCRIBED).is_file():  # true if a recipe of medsilo made the job with `room`
            return ScriptStart.from_values(json.loads(read_bounded(config / DESCRIBED, LARGEST_YAML)), DESCRIBED)
        told = json.loads(read_bounded(config / CONFIG, LARGEST_YAML))
        executors: Sequence[Any] = told["executors"]
        (own,) = (executor["executor"] for executor in executors)
        return ScriptStart.of(own["args"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("the job has no training script of medsilo's recipes, and this hospital runs no other") from error


def site_configuration(plan: Path) -> dict[str, Any]:
    """Return the NVFlare configuration for a site whose script runs in an isolated process."""
    try:
        timeouts = limits(timeouts_of(load_plan(plan)), "site")
    except MedsiloError as error:
        raise Refused(f"the job's plan can't be read: {error}") from error
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": EXECUTOR, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        **timeouts,
    }
