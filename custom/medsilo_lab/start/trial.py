"""Try a plan on this machine: check each hospital, train, and test the commands that 'medsilo init' proposes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from medsilo.check.result import Report
from medsilo.check.site_check import Visit, check
from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess
from medsilo_lab.start.dataset_layout import place_of
from medsilo_lab.study.reading_once import keeping_ready

ROUNDS = 12  # number of training rounds in a trial: enough for small plans, and the same on every machine


def checked(site: str, plan: Plan, out: Path, ready: Path) -> Report:
    """Run 'medsilo check' for one hospital. `ready` is the folder for preprocessed images."""
    local = place_of(out, site)
    source = keeping_ready(SiteSettings.read(local), plan.task, ready).data

    def note(line: str) -> None:
        print(f"{site}: {line} ...", file=sys.stderr, flush=True)

    return check(Visit(site, plan, local=local, source=source), note)


def alone(plan: Plan) -> Plan:
    return plan.with_changes(["algorithm.name=local", f"training.rounds={ROUNDS}", "participation.evaluation_sites=[]"])


def try_methods(plan: Plan, methods: Sequence[str], settings: SiteSettings) -> None:
    """With each method, run one short round in which all hospitals take part. If a method fails, the error names the
    method.
    """
    for method in methods:
        short = plan.with_changes([f"algorithm.name={method}", "training.rounds=1", "training.local_epochs=1"])
        with TemporaryDirectory(prefix="medsilo-") as folder:
            try:
                inprocess.run(short, folder=Path(folder), settings=settings)
            except MedsiloError as error:
                told = f"a comparison would fail ({method}): {error}"
                raise MedsiloError(f"{told}; or leave that hospital out of the plan", error.private) from error
