"""Try a plan on this machine: check each hospital, and let it train alone for some rounds."""

import sys
from pathlib import Path

from medsilo.check.result import Report
from medsilo.check.visit import Visit, check
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.start.dataset_layout import place_of
from medsilo_lab.study.reading_once import keeping_ready

ROUNDS = 12  # the same on every machine, so that a slow one teaches no less; small plans have learned something then


def checked(site: str, plan: Plan, out: Path, ready: Path) -> Report:
    """Return what 'medsilo check' says of a hospital."""
    local = place_of(out, site)
    source = keeping_ready(SiteSettings.read(local), plan.task, ready).data

    def note(line: str) -> None:
        print(f"{site}: {line} ...", file=sys.stderr, flush=True)

    return check(Visit(site, plan, local=local, source=source), note)


def alone(plan: Plan) -> Plan:
    """Return the plan of the trial: single-site training over a fixed number of rounds."""
    return plan.with_changes(["algorithm.name=local", f"training.rounds={ROUNDS}", "participation.evaluation_sites=[]"])
