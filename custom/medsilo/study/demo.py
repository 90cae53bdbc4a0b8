"""The demo: every method that exists, over three synthetic hospitals, and one report."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from medsilo.algorithms import ALGORITHMS
from medsilo.errors import MedsiloError
from medsilo.flare import simulator
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings
from medsilo.study import inprocess
from medsilo.study.progress import round_lines

SITES = ["hospital-a", "hospital-b", "hospital-c"]


def demo_plan(method: str, rounds: int, seed: int) -> Plan:
    """The demo's plan for one method: the same task, network and training for all."""
    return parse_plan(
        {
            "algorithm": {"name": method},
            "task": {"name": "synthetic-histology"},
            "training": {
                "rounds": rounds,
                "batch_size": 16,
                "learning_rate": 0.02,
                "momentum": 0.9,
                "weight_decay": 0.0001,
            },
            "participation": {"sites": SITES},
            "seed": seed,
        }
    )


def run_demo(output: Path, rounds: int, seed: int, say: Callable[[str], None]) -> tuple[list[Path], list[str]]:
    """Run all methods; returns the folders of the runs and the failures. One that fails doesn't stop the others."""
    folder = output / f"demo-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise MedsiloError(f"run folder {folder} exists; wait a second and try again")
    runs, failures = [], []
    for method, algorithm in ALGORITHMS.items():
        plan = demo_plan(method, rounds, seed)
        where = "in process, all data pooled" if algorithm.pooled else "NVFlare simulator"
        say(f"\n{algorithm.title} ({where})")
        started = time.monotonic()

        def on_round(record: dict, plan: Plan = plan) -> None:
            for line in round_lines(record, plan.rounds, plan.task.metric):
                say(line)

        run = folder / method
        try:
            if algorithm.pooled:
                inprocess.run(plan, folder=run, on_round=on_round)
            else:
                simulator.run(plan, run, SiteSettings(device="cpu"), on_round=on_round)
            say(f"finished in {time.monotonic() - started:.0f} s")
        except MedsiloError as error:
            failures.append(f"{algorithm.title}: {error}")
            say(f"FAILED: {error}")
        if (run / "summary.json").exists():
            runs.append(run)
    return runs, failures
