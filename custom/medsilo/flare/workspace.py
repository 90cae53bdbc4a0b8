"""Find things in NVFlare's workspace: the job's plan, the site's settings, the place for results."""

import json
import shutil
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medsilo.core.files import write_text
from medsilo.plan import Plan, parse_plan, read_plan
from medsilo.runs import paths
from medsilo.site.kit import KitFiles
from medsilo.site.party import PartySettings


def _workspace(fl_ctx: FLContext) -> Workspace:
    return fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT) or fl_ctx.get_engine().get_workspace()


def plan_of_job(fl_ctx: FLContext, settings: PartySettings) -> Plan:
    """The plan.yaml beside the job's configuration; refused where it uses a package that this party doesn't allow."""
    return parse_plan(read_plan(file_of_job(fl_ctx, paths.PLAN), beside=True), allowed=settings.packages)


def file_of_job(fl_ctx: FLContext, name: str) -> Path:
    """Return a file beside the job's configuration."""
    return Path(_workspace(fl_ctx).get_app_config_dir(fl_ctx.get_job_id())) / name


def settings_folder(fl_ctx: FLContext) -> Path:
    """Return the `local/` folder of a kit, which studies do not change."""
    return Path(_workspace(fl_ctx).get_site_config_dir())


def settings_of_server(fl_ctx: FLContext) -> PartySettings:
    """Read the medsilo.yaml in `local/`; a simulated server shares it with the sites."""
    return PartySettings.read(settings_folder(fl_ctx), with_others=kit_of(fl_ctx, "server") is None)


def kit_of(fl_ctx: FLContext, of: str = "client") -> KitFiles | None:
    """Return where a hospital's kit, or the server's, has its certificate and key; None in a simulation."""
    startup = Path(_workspace(fl_ctx).get_startup_kit_dir())
    files = [startup / name for name in (f"{of}.crt", f"{of}.key", "rootCA.pem")]
    return KitFiles(*map(str, files)) if all(file.is_file() for file in files) else None


def kit_folder(fl_ctx: FLContext) -> Path:
    """Return the folder of this party's kit."""
    return Path(_workspace(fl_ctx).get_root_dir())


def output_folder(fl_ctx: FLContext, settings: PartySettings) -> Path:
    """Return where this party keeps its studies; outside NVFlare's run folder, which goes when a job ends."""
    return settings.output or kit_folder(fl_ctx) / "medsilo"


def cloned_from(fl_ctx: FLContext) -> str | None:
    """The job that this one is a clone of, as 'medsilo resume' makes them."""
    return _meta(fl_ctx).get("cloned_from")


def submitter_of(fl_ctx: FLContext) -> str | None:
    """Return who submitted the job, as NVFlare authenticated them; None in a simulation."""
    return _meta(fl_ctx).get("submitter_name")


def _meta(fl_ctx: FLContext) -> dict[str, Any]:
    path = Path(_workspace(fl_ctx).get_job_meta_path(fl_ctx.get_job_id()))
    return json.loads(path.read_text()) if path.exists() else {}


def publish_refusal(reason: str, fl_ctx: FLContext) -> None:
    """Leave for the lead why the job failed, also when it led no study."""
    write_text(Path(_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / paths.REFUSED, reason)


def publish(run: Path, fl_ctx: FLContext) -> None:
    """Copy into NVFlare's own run folder, which the lead can download, what no hospital keeps to itself.

    The server's checkpoints stay behind: they may hold hospitals' personal models.
    """
    destination = Path(_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "medsilo" / run.name
    for name in paths.PUBLISHED:
        if (run / name).is_dir():
            shutil.copytree(run / name, destination / name)
        elif (run / name).exists():
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / name, destination / name)
