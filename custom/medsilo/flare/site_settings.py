"""Read a hospital's settings for a job, and check that the hospital's engineer accepted these settings."""

from nvflare.apis.fl_context import FLContext

from medsilo.core.errors import MedsiloError
from medsilo.flare.workspace import file_of_job, kit_of, output_folder, plan_of_job, settings_folder
from medsilo.runs import paths
from medsilo.site.accepted_settings import AcceptedSettings, check_there
from medsilo.site.kit import KitFiles
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

UNREAD = f"this hospital's {FILE_NAME} can't be used; its engineer sees why with 'medsilo check --kit KIT'"


def settings_of_site(fl_ctx: FLContext) -> SiteSettings:
    """Return the settings in the startup kit's `local/medsilo.yaml`. In a simulation, each site may have a separate
    settings file.

    Raises MedsiloError if a hospital's startup kit lacks medsilo.yaml, or if the settings changed and were not
    accepted.
    """
    local, kit = settings_folder(fl_ctx), kit_of(fl_ctx)
    if kit is None:
        own = local / fl_ctx.get_identity_name()
        return SiteSettings.read(own if (own / FILE_NAME).is_file() else local)
    if not (local / FILE_NAME).exists() and _needs_no_settings(fl_ctx):
        settings = SiteSettings()
    else:
        check_there(local)
        with MedsiloError.kept_back(UNREAD):
            settings = SiteSettings.read(local)
    accept_at_first(kit, settings, fl_ctx)
    return settings


def accept_at_first(kit: KitFiles, settings: SiteSettings, fl_ctx: FLContext) -> None:
    """Accept the settings of a startup kit before the first study that the kit runs.

    Raises Refused if the settings have changed since a person last accepted the settings.
    """
    records = settings.state_dir or output_folder(fl_ctx, settings) / paths.HOSPITAL
    AcceptedSettings(kit, records / fl_ctx.get_identity_name()).begin(settings)


def _needs_no_settings(fl_ctx: FLContext) -> bool:
    """True if a job needs no settings of the hospital: the job's data are synthetic, or a training script reads the
    data.

    A job that needs no settings also runs with a startup kit without settings, such as a kit that `nvflare poc` made.
    """
    if not file_of_job(fl_ctx, paths.PLAN).exists():
        return False
    task = plan_of_job(fl_ctx, SiteSettings()).task
    return task.synthetic or task.scripted
