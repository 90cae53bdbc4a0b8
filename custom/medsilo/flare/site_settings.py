"""A hospital's settings for a job, as its engineer accepted them."""

from nvflare.apis.fl_context import FLContext

from medsilo.flare.workspace import file_of_job, kit_of, plan_of_job, settings_folder
from medsilo.runs import paths
from medsilo.site.accepted_settings import AcceptedSettings, check_there
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings


def settings_of_site(fl_ctx: FLContext) -> SiteSettings:
    """The medsilo.yaml in the kit's `local/` folder, which studies do not change; a simulated site may have its own.

    Raises MedsiloError where a hospital's kit has none, or where it changed and nobody said so.
    """
    local, kit = settings_folder(fl_ctx), kit_of(fl_ctx)
    if kit is None:
        own = local / fl_ctx.get_identity_name()
        return SiteSettings.read(own if (own / FILE_NAME).is_file() else local)
    if not (local / FILE_NAME).exists() and _needs_no_settings(fl_ctx):
        AcceptedSettings(kit).check()  # it has not just gone
        return SiteSettings()
    check_there(local)
    settings = SiteSettings.read(local)
    AcceptedSettings(kit).begin(settings)
    return settings


def _needs_no_settings(fl_ctx: FLContext) -> bool:
    """Return whether settings say nothing of the job's data: they are synthetic, or a training script's own.

    So it runs with a kit such as `nvflare poc` makes.
    """
    if not file_of_job(fl_ctx, paths.PLAN).exists():
        return False
    task = plan_of_job(fl_ctx, SiteSettings()).task
    return task.synthetic or task.scripted
