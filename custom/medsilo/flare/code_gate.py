"""Decide if a job that contains code may start at a hospital that approves plans.

The startup kit's process decides about a job before any code of the job runs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_constant import SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace

from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded
from medsilo.core.text import is_safe_name, plain
from medsilo.flare.site_settings import accept_at_first
from medsilo.flare.workspace import kit_folder, kit_in, kit_of, settings_folder, workspace_of
from medsilo.runs import paths
from medsilo.runs.events import Event, write
from medsilo.site.accepted_settings import AcceptedSettings
from medsilo.site.job_code import PLAN, JobCode, as_brought
from medsilo.site.settings import SiteSettings
from nvflare_reliability.kit_patches import AskingDeployer, has_image_of_its_own

# imported inside functions, because the modules load PyTorch, which only the approval of code needs
if TYPE_CHECKING:
    from medsilo.federation.site_context import SiteContext
    from medsilo.plan import Plan

NO_PLAN = "this hospital approves plans before they run (approval), and this job brings code and no plan of medsilo's"
OTHER_IMAGE = (
    "this hospital approves code before it runs (approval), and this job names an image or path of its own for it"
)
NO_NOISE = (
    "this hospital demands differential privacy of every study (privacy in its medsilo.yaml), and nobody counts what a "
    "job's own code sends; run one of medsilo's own tasks"
)
UNNAMED = "job"  # the name of a study whose job has an invalid name
LARGEST_META = 1 << 20  # maximum bytes of a job's meta.json


def ask_when_deploying(engine: Any) -> None:
    """Check each job in the hospital's own process while it is unpacked, so that the lead receives the reason for a
    rejection.

    If the startup kit has configured its own component for unpacking jobs, the kit keeps its component.
    """
    if engine.get_component(SystemComponents.APP_DEPLOYER) is None:
        engine.add_component(SystemComponents.APP_DEPLOYER, AskingDeployer(why_not_deployed))


def why_not_deployed(workspace: Workspace, job: str, fl_ctx: FLContext) -> str:
    """Return the reason why this hospital rejects an unpacked job, or "" if the hospital accepts the job.

    The function also writes the reason for the rejection to the kit's events.log.
    """
    meta = _meta(Path(workspace.get_job_meta_path(job)))
    reason = why_not_started(fl_ctx, {**meta, JobMetaKey.JOB_ID.value: job}) if meta.get(AppValidationKey.BYOC) else ""
    if reason:
        write(kit_folder(fl_ctx), Event("refused", reason, needs_somebody=True))
    return reason


def why_not_started(fl_ctx: FLContext, meta: Mapping[str, Any]) -> str:
    """Return the reason why this hospital rejects a job that contains code, or "" if the hospital accepts the job."""
    try:
        if kit := kit_of(fl_ctx):
            AcceptedSettings(kit).check()
        settings = SiteSettings.read(settings_folder(fl_ctx))
        if settings.privacy is not None:
            return NO_NOISE
        if refusal := settings.refuses(trains=True):
            return f"{refusal}; a job's own code may train"
        # A hospital that approves no plans also needs accepted settings, because its ledger must record the numbers
        # that the script sends
        if kit:
            accept_at_first(kit, settings, fl_ctx)
        if settings.approval_of() == "none":
            return ""
        site = fl_ctx.get_identity_name()
        if has_image_of_its_own(meta, site):
            return OTHER_IMAGE
        app = as_brought(Path(workspace_of(fl_ctx).get_app_dir(str(meta.get(JobMetaKey.JOB_ID.value)))))
        if not (app / PLAN).is_file():
            return NO_PLAN
        from medsilo.federation.permission import Permission
        from medsilo.plan import parse_plan, read_plan

        plan = parse_plan(read_plan(app / PLAN, beside=True), allowed=settings.packages)
        place = place_of_job(app, kit_folder(fl_ctx), plan, site, settings)
        Permission(place).begin()
    except MedsiloError as error:
        return plain(error)
    return ""


def place_of_job(
    app: Path, kit: Path, plan: "Plan", site: str, settings: SiteSettings, has_run: bool = False
) -> "SiteContext":
    """Return the site's context for a job that contains code, before the server has sent the study's name.

    If the hospital approves plans, the context contains a description of the job's code. Raises MedsiloError if the
    code is invalid.

    Args:
        has_run: Whether the app's code has already been started.
    """
    from medsilo.federation.site_context import SiteContext

    meta = _meta(app.parent / "meta.json")
    name, lead = (str(meta.get(key.value) or "") for key in (JobMetaKey.JOB_NAME, JobMetaKey.SUBMITTER_NAME))
    folder = paths.site_folder(settings.studies_in(kit) / (name if is_safe_name(name) else UNNAMED), site)
    approves = settings.approval_of() != "none"
    code = JobCode.read(app, plan.network.files, has_run) if approves else None
    sites = plan.participation.everyone
    return SiteContext(plan, site, sites, settings, folder, lead, kit_in(kit / "startup"), job_code=code)


def _meta(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, LARGEST_META))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
