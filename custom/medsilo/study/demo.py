"""The demo: does joining pay for three synthetic hospitals, over several seeds; and the same study under NVFlare."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.flare import simulator
from medsilo.plan import Plan, parse_plan
from medsilo.runs.schema import About, Round
from medsilo.site.settings import SiteSettings
from medsilo.study.cells import Row, base_plan, cells_of
from medsilo.study.compare import Study
from medsilo.study.progress import Moment, StudyProgress, round_lines

# Hospitals as small as many are. Numbers that leave room between training alone and pooled data; no setting was found,
# and none was sought further, in which the methods for unlike hospitals are surely above FedAvg.
SMALL = (
    "task.patients=12",
    "task.size=32",
    "training.batch_size=8",
    "training.local_epochs=3",
    "network.name=small-cnn",
    "network.norm=batch-statistics",
)
TOGETHER, ALONE, RUNNING, POOLED, HARMONISED = "FedAvg", "Local", "FedAvg, running statistics", "Central", "HarmoFL"
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


@dataclass(frozen=True)
class SameNumbers:
    """The run under NVFlare held against the one in this process."""

    folder: Path
    tensors: int  # of all sites' models
    different: int


@dataclass(frozen=True)
class Demo:
    """A demo that ended: the comparison's folder, the failures, and the study under NVFlare."""

    folder: Path
    failures: tuple[str, ...]
    same: SameNumbers | None


def demo_plan(rounds: int) -> Plan:
    """Return the plan that the rows change."""
    return parse_plan(base_plan(), [*SMALL, f"training.rounds={rounds}"])


def run_demo(
    output: Path,
    rounds: int,
    seeds: Sequence[int],
    command: str,
    say: Callable[[str], None],
    tell_more: Callable[[Callable[[], str]], None] = lambda tell: None,
) -> Demo:
    """Run all rows with all seeds, then one study in NVFlare's simulator. One that fails stops no other.

    tell_more: is given what tells which runs go on.
    """
    plan = demo_plan(rounds)
    folder = output / f"demo-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise MedsiloError(f"run folder {folder} exists; wait a second and try again")
    cells = cells_of(plan, [Row.parse(text) for text in ROWS], seeds, [], folder)
    about = About(title="Demo: three synthetic hospitals", command=command, machine=f"{os.cpu_count()} CPU cores")
    settings = SiteSettings(device="cpu", studies=None)
    study = Study(folder, about, plan, cells, TOGETHER)
    tell_more(study.under_way)
    failures = study.run("inprocess", settings, AT_ONCE, say)
    first = next(cell for cell in cells if cell.row.title == TOGETHER)
    say(f"{first.name} again, in NVFlare's simulator")
    tell_more(StudyProgress((), plan.rounds, "", look=partial(Moment.of_run, folder / "nvflare")).sentence)

    def on_round(line: Round) -> None:
        for text in round_lines(line, plan.rounds, plan.task.goal.metric):
            say(text)

    try:
        simulator.run(first.plan, folder / "nvflare", settings, on_round=on_round, say=say)
    except MedsiloError as error:
        return Demo(folder, (*failures, f"NVFlare's simulator: {error}"), None)
    return Demo(folder, tuple(failures), same_numbers(first.folder, folder / "nvflare"))


def same_numbers(here: Path, there: Path) -> SameNumbers:
    """Compare all models of two runs bit for bit."""
    tensors = different = 0
    for path in sorted(here.glob("sites/*/*.safetensors")):
        mine, (theirs, _) = load_tensors(path)[0], load_tensors(there / path.relative_to(here))
        tensors += len(mine)
        different += sum(name not in theirs or not torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    return SameNumbers(there, tensors, different)
