"""Read hospitals' images once for all runs of a comparison, and share what is ready between its processes."""

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
    """Give settings under which no run of these plans reads images again; all are read before, hospital by hospital."""
    tasks = {plan.task.model_dump_json(exclude={"fold"}): plan for plan in plans}
    ours = [plan for plan in tasks.values() if isinstance(plan.task, OwnFolder)]
    if not ours or settings.data is None or not (settings.data.cache_memory or settings.data.cache_folder):
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


def _read_site(one: Work) -> int:
    """Read a hospital's images; return how many cases there are. What is wrong with them, the runs say."""
    plan, site, settings = one
    survey = plan.task.survey(site, sorted(plan.participation.everyone), plan.seed, settings.of(site).data)
    return sum(part.cases for part in survey.parts.values())


def keeping_ready(settings: Any, task: Task, folder: Path) -> Any:
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
