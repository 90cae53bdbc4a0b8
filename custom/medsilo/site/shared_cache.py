"""Let several runs on one machine share the images that one of them made ready."""

from pathlib import Path

from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.own_data import OwnFolder
from medsilo.tasks.task import Task


def keeping_ready(settings: SiteSettings, task: Task, folder: Path) -> SiteSettings:
    """Return settings under which images that are ready for the network lie in a folder, too, and are made once.

    Where a hospital names a folder for them itself, or wants none in memory, that stays.
    """
    if settings.data is None or not isinstance(task, OwnFolder):
        return settings
    data = settings.data
    if data.cache_memory and not data.cache_folder:
        data = data.model_copy(update={"cache_folder": folder})
    sites = getattr(settings, "sites", {})
    more = {"sites": {site: keeping_ready(own, task, folder) for site, own in sites.items()}} if sites else {}
    return settings.model_copy(update={"data": data, **more})
