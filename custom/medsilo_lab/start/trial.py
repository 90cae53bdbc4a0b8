"""Try a plan on this machine: check each hospital, and let it train alone for some rounds."""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from medsilo.check.rehearsal import free_memory
from medsilo.check.result import Report
from medsilo.check.visit import Visit, check
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.own.own_data import keeping_ready
from medsilo_lab.start.dataset_layout import place_of
from medsilo_lab.start.fitting import Machine

ROUNDS = 12  # the same on every machine, so that a slow one teaches no less; small plans have learned something then


def machine_of(settings: SiteSettings) -> Machine:
    """Return what is free on the device that the settings name."""
    compute = settings.compute()
    return Machine(free_memory(compute), compute.device.type == "cuda")


def checks(plan: Plan, out: Path, ready: Path) -> Iterator[tuple[str, Report]]:
    """Yield what 'medsilo check' says of each hospital; of several each in a fresh process, whose memory tells what a
    hospital needs that trains alone on its machine."""
    sites = plan.participation.everyone
    if len(sites) == 1:
        yield sites[0], _checked(sites[0], plan, out, ready)
        return
    processes = get_context("forkserver")
    processes.set_forkserver_preload([__name__, *(["monai"] if "monai" in sys.modules else [])])  # which takes seconds
    with ProcessPoolExecutor(1, processes, max_tasks_per_child=1) as pool:
        for site in sites:
            yield site, pool.submit(_checked, site, plan, out, ready).result()


def _checked(site: str, plan: Plan, out: Path, ready: Path) -> Report:
    local = place_of(out, site)
    source = keeping_ready(SiteSettings.read(local), plan.task, ready).data

    def note(line: str) -> None:
        print(f"{site}: {line} ...", file=sys.stderr, flush=True)

    return check(Visit(site, plan, local=local, source=source), note)


def alone(plan: Plan) -> Plan:
    """Return the plan of the trial: single-site training over a fixed number of rounds."""
    return plan.with_changes(["algorithm.name=local", f"training.rounds={ROUNDS}", "participation.evaluation_sites=[]"])
