"""The demo: three synthetic hospitals train alone and together, over several seeds."""

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.study.cells import Row, base_plan, cells_of
from medsilo_lab.study.compare import Study
from medsilo_lab.study.verdict_file import About

# Hospitals as small as many are. Numbers that leave room between training alone and pooled data; no setting was found,
# and none was sought further, in which the methods for unlike hospitals are significantly above FedAvg.
SMALL = (
    "task.patients=12",
    "task.size=32",
    "training.batch_size=8",
    "training.local_epochs=3",
    "network.name=small-cnn",
    "network.norm=batch-statistics",
)
TOGETHER, ALONE, RUNNING, POOLED, HARMONISED = "FedAvg", "Local", "FedAvg (running statistics)", "Central", "HarmoFL"
ROWS = (
    f"{ALONE}: algorithm.name=local",
    f"{TOGETHER}: algorithm.name=fedavg",
    f"{RUNNING}: network.norm=batch",
    f"{HARMONISED}: algorithm.name=harmofl",
    "FedSM: algorithm.name=fedsm",
    "AdaFed: algorithm.name=adafed network.norm=batch",
    f"{POOLED}: algorithm.name=central",
)
AT_ONCE = 2


def demo_plan(rounds: int) -> Plan:
    """Return the plan that the rows change."""
    return parse_plan(base_plan(), [*SMALL, f"training.rounds={rounds}"])


def demo_study(output: Path, rounds: int, seeds: Sequence[int], say: Callable[[str], None]) -> Study:
    """Return the comparison of all rows with all seeds, which is yet to be run."""
    folder = output / f"demo-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise MedsiloError(f"run folder {folder} exists; wait a second and try again")
    cells = cells_of(demo_plan(rounds), [Row.parse(text) for text in ROWS], seeds, [], folder)
    about = About(title="Demo: three synthetic hospitals", machine=f"{os.cpu_count()} CPU cores")
    settings = SiteSettings(device="cpu", studies=None)
    return Study(folder, about, cells, TOGETHER, settings=settings, at_once=AT_ONCE, say=say)
