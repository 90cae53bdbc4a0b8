"""Let several runs on one machine share the images that one of them made ready."""

from pathlib import Path
from shutil import disk_usage

from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.own_data import OwnFolder
from medsilo.tasks.task import Task

MOST = 10  # GiB of images that are kept ready


def keeping_ready(settings: SiteSettings, task: Task, folder: Path) -> SiteSettings:
    """Return settings under which images that are ready for the network lie in a folder, too, and are made once.

    What a hospital itself says of its cache stays: on the disk where it says, or nowhere.
    """
    if settings.data is None or not isinstance(task, OwnFolder):
        return settings
    data = settings.data
    if data.cache == "memory":
        room = min(MOST, disk_usage(folder).free / 4 / 2**30)
        data = data.model_copy(update={"cache_folder": folder, "cache_disk": room})
    sites = getattr(settings, "sites", {})
    more = {"sites": {site: keeping_ready(own, task, folder) for site, own in sites.items()}} if sites else {}
    return settings.model_copy(update={"data": data, **more})
