"""Preprocess the images once for all runs of a comparison. All processes of the comparison share the preprocessed
images.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from os import getpid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medsilo.core.parent_watch import end_with
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.own_data import OwnFolder
from medsilo.tasks.task import Task


@contextmanager
def images_ready(
    plans: Sequence[Plan], settings: SiteSettings, at_once: int, say: Callable[[str], object]
) -> Iterator[SiteSettings]:
    """Preprocess the images of all hospitals, one hospital at a time. Yield the settings with which runs read the
    preprocessed images.
    """
    tasks = {plan.task.model_dump_json(exclude={"fold"}): plan for plan in plans}
    ours = [plan for plan in tasks.values() if isinstance(plan.task, OwnFolder)]
    sources = [own.data for own in (settings, *getattr(settings, "sites", {}).values()) if own.data]
    if not ours or not any(source.cache_memory or source.cache_folder for source in sources):
        yield settings
        return
    with TemporaryDirectory(prefix="medsilo-") as folder:
        shared = keeping_ready(settings, ours[0].task, Path(folder))
        work = [(plan, site, shared) for plan in ours for site in plan.participation.everyone]
        say(f"reading the images of {len(work)} hospitals once for all runs")
        for number, (_, site, _), cases in _read(work, at_once):
            say(f"read {number}/{len(work)}  {site}: {cases} cases")
        yield shared


Work = tuple[Plan, str, SiteSettings]


def _read(work: Sequence[Work], at_once: int) -> Iterator[tuple[int, Work, int]]:
    if at_once == 1:
        yield from ((number, one, _read_site(one)) for number, one in enumerate(work, 1))
        return
    with ProcessPoolExecutor(at_once, get_context("spawn"), end_with, (getpid(),)) as pool:
        for number, (one, cases) in enumerate(zip(work, pool.map(_read_site, work), strict=True), 1):
            yield number, one, cases


def _read_site(work: Work) -> int:
    """Preprocess a hospital's images, and return the number of cases. Faulty images are not reported here, because the
    runs report them.
    """
    plan, site, settings = work
    survey = plan.task.survey(site, sorted(plan.participation.everyone), plan.seed, settings.of(site).data)
    return sum(part.cases for part in survey.parts.values())


def keeping_ready(settings: Any, task: Task, folder: Path) -> Any:
    """Return settings with which preprocessed images are stored in the folder `folder`.

    Settings that already name a folder for preprocessed images, or disable the cache, are returned unchanged.
    """
    if not isinstance(task, OwnFolder):
        return settings
    data = settings.data
    if data and data.cache_memory and not data.cache_folder:
        data = data.model_copy(update={"cache_folder": folder})
    sites = getattr(settings, "sites", {})
    more = {"sites": {site: keeping_ready(own, task, folder) for site, own in sites.items()}} if sites else {}
    return settings.model_copy(update={"data": data, **more})
