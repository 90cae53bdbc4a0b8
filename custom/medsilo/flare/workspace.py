"""Where things lie in NVFlare's workspace: the job's plan, the site's settings, the place for results."""

from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medsilo.plan import Plan, load_plan
from medsilo.site.settings import SiteSettings, read_settings


def _workspace(fl_ctx: FLContext) -> Workspace:
    return fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT) or fl_ctx.get_engine().get_workspace()


def plan_of_job(fl_ctx: FLContext) -> Plan:
    """The plan.yaml beside the job's configuration."""
    return load_plan(Path(_workspace(fl_ctx).get_app_config_dir(fl_ctx.get_job_id())) / "plan.yaml")


def settings_of_site(fl_ctx: FLContext) -> SiteSettings:
    """The medsilo.yaml in the kit's `local/` folder, out of any job's reach."""
    return read_settings(Path(_workspace(fl_ctx).get_site_config_dir()))


def output_folder(fl_ctx: FLContext, settings: SiteSettings) -> Path:
    """Where this party keeps its studies; outside NVFlare's run folder, which goes when a job ends."""
    return settings.output or Path(_workspace(fl_ctx).get_root_dir()) / "medsilo"
