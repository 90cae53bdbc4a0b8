"""Find files in NVFlare's workspace: a job's plan, a party's settings, and the folder for results."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medsilo.core.files import write_text
from medsilo.runs import paths
from medsilo.site.job_code import JobCode, as_brought, has_code
from medsilo.site.kit import KitFiles
from medsilo.site.party import PartySettings

# A startup kit's process needs no plan, and starts twice as fast without PyTorch, which medsilo.plan imports.
if TYPE_CHECKING:
    from medsilo.plan import Plan


def workspace_of(fl_ctx: FLContext) -> Workspace:
    return fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT) or fl_ctx.get_engine().get_workspace()


def plan_of_job(fl_ctx: FLContext, settings: PartySettings) -> "Plan":
    """Return the job's plan. Raises MedsiloError if the plan uses a package that this party does not allow."""
    from medsilo.plan import parse_plan, read_plan

    return parse_plan(read_plan(file_of_job(fl_ctx, paths.PLAN), beside=True), allowed=settings.packages)


def code_of_job(fl_ctx: FLContext, plan: "Plan") -> JobCode | None:
    """Return the code of the running job; None if the job contains no code. Raises MedsiloError for invalid code."""
    app = as_brought(Path(workspace_of(fl_ctx).get_app_dir(fl_ctx.get_job_id())))
    return JobCode.read(app, plan.network.files, has_run=True) if has_code(app) else None


def file_of_job(fl_ctx: FLContext, name: str) -> Path:
    """Return the path of a file in the folder that contains the job's configuration."""
    return Path(workspace_of(fl_ctx).get_app_config_dir(fl_ctx.get_job_id())) / name


def settings_folder(fl_ctx: FLContext) -> Path:
    """Return the folder `local` of the startup kit, whose files do not change during a study."""
    return Path(workspace_of(fl_ctx).get_site_config_dir())


def settings_of_server(fl_ctx: FLContext) -> PartySettings:
    """Return the server's settings in `local/medsilo.yaml`. In a simulation, the settings file of the server also
    contains the settings of the sites.
    """
    return PartySettings.read(settings_folder(fl_ctx), with_others=kit_of(fl_ctx, "server") is None)


def kit_of(fl_ctx: FLContext, of: str = "client") -> KitFiles | None:
    """Return the paths of the certificates and the key in this party's startup kit; None in a simulation."""
    return kit_in(Path(workspace_of(fl_ctx).get_startup_kit_dir()), of)


def kit_in(startup: Path, of: str = "client") -> KitFiles | None:
    """Return the paths of the certificates and the key in a startup kit's folder `startup`; None if a file is
    missing.
    """
    files = [startup / name for name in (f"{of}.crt", f"{of}.key", "rootCA.pem")]
    return KitFiles(*map(str, files)) if all(file.is_file() for file in files) else None


def kit_folder(fl_ctx: FLContext) -> Path:
    return Path(workspace_of(fl_ctx).get_root_dir())


def output_folder(fl_ctx: FLContext, settings: PartySettings) -> Path:
    """Return the folder that contains this party's studies.

    The folder is not in NVFlare's run folder, because NVFlare removes the run folder after a job.
    """
    return settings.studies_in(kit_folder(fl_ctx))


def cloned_from(fl_ctx: FLContext) -> str | None:
    """Return the identifier of the job that 'medsilo resume' cloned to make this job; None if this job is no clone."""
    return _meta(fl_ctx).get("cloned_from")


def submitter_of(fl_ctx: FLContext) -> str | None:
    """Return the authenticated name of the person who submitted the job; None in a simulation."""
    return _meta(fl_ctx).get("submitter_name")


def brings_code(fl_ctx: FLContext) -> bool:
    """True if the job contains code; NVFlare has then checked that the lead may send code."""
    return _meta(fl_ctx).get(AppValidationKey.BYOC) is True


def _meta(fl_ctx: FLContext) -> dict[str, Any]:
    path = Path(workspace_of(fl_ctx).get_job_meta_path(fl_ctx.get_job_id()))
    return json.loads(path.read_text()) if path.exists() else {}


def publish_refusal(reason: str, fl_ctx: FLContext) -> None:
    """Write the reason why a job failed to a file in NVFlare's run folder, from which the lead can download the
    file.
    """
    write_text(Path(workspace_of(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / paths.REFUSED, reason)


def publish(run: Path, fl_ctx: FLContext) -> None:
    """Copy the run's public files into NVFlare's run folder, so that the lead can download the files.

    The server's checkpoints are not public, because they may contain hospitals' personal models.
    """
    destination = Path(workspace_of(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "medsilo" / run.name
    for name in paths.PUBLISHED:
        if (run / name).is_dir():
            shutil.copytree(run / name, destination / name)
        elif (run / name).exists():
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / name, destination / name)
