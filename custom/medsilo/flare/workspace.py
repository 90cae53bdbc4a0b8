"""Where things lie in NVFlare's workspace: the job's plan, the site's settings, the place for results."""

import shutil
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medsilo.plan import Plan, load_plan
from medsilo.site.settings import SiteSettings, read_settings

PUBLISHED = ("plan.yaml", "provenance.json", "rounds.jsonl", "summary.json", "global", "figures")


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


def publish(run: Path, fl_ctx: FLContext) -> None:
    """Copy into NVFlare's own run folder, which the lead can download, what no single hospital owns.

    The server's checkpoints stay behind: they may hold hospitals' personal models.
    """
    destination = Path(_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "medsilo" / run.name
    for name in PUBLISHED:
        if (run / name).is_dir():
            shutil.copytree(run / name, destination / name)
        elif (run / name).exists():
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / name, destination / name)
