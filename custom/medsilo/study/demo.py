"""The demo: nine methods over three synthetic hospitals, and one report."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.federation import inprocess
from medsilo.flare import simulator
from medsilo.plan import Plan, parse_plan
from medsilo.runs.paths import SUMMARY
from medsilo.runs.schema import Round
from medsilo.site.settings import SiteSettings
from medsilo.study.base_plan import SITES, base_plan
from medsilo.study.progress import round_lines

# Not all there are, so that the demo stays well under three minutes.
METHODS = ("local", "fedavg", "fedprox", "fedbn", "fedper", "harmofl", "fedsm", "adafed", "central")
AT_ONCE = 2  # federations side by side: much of their time is waiting


def demo_plan(method: str, rounds: int, seed: int) -> Plan:
    """The demo's plan for one method: the same task, network and training for all."""
    return parse_plan(base_plan(), [f"algorithm.name={method}", f"training.rounds={rounds}", f"seed={seed}"])


def run_demo(output: Path, rounds: int, seed: int, say: Callable[[str], None]) -> tuple[list[Path], list[str]]:
    """Run all methods; returns the folders of the runs and the failures. One that fails doesn't stop the others."""
    plans = [demo_plan(method, rounds, seed) for method in METHODS]
    folder = output / f"demo-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise MedsiloError(f"run folder {folder} exists; wait a second and try again")
    say(f"{len(plans)} methods, {len(SITES)} synthetic hospitals, {rounds} rounds, in NVFlare's simulator")
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        outcomes = list(pool.map(lambda plan: _run(plan, folder, say), [p for p in plans if not p.algorithm.pooled]))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, nothing new begins
    outcomes += [_run(plan, folder, say) for plan in plans if plan.algorithm.pooled]
    runs = [folder / plan.algorithm.name for plan in plans if (folder / plan.algorithm.name / SUMMARY).exists()]
    return runs, [failure for failure in outcomes if failure]


def _run(plan: Plan, folder: Path, say: Callable[[str], None]) -> str | None:
    """Run one method; returns what went wrong."""
    title, run = plan.algorithm.title, folder / plan.algorithm.name

    def on_round(line: Round) -> None:
        for text in round_lines(line, plan.rounds, plan.task.metric):
            say(f"{title:<9}{text}")

    started = time.monotonic()
    try:
        if plan.algorithm.pooled:  # all data in one place: no federation, so in this process
            inprocess.run(plan, folder=run, on_round=on_round)
        else:
            simulator.run(plan, run, SiteSettings(device="cpu", studies=None), on_round=on_round)
    except MedsiloError as error:
        say(f"{title:<9}FAILED: {error}")
        return f"{title}: {error}"
    say(f"{title:<9}finished in {time.monotonic() - started:.0f} s")
    return None
