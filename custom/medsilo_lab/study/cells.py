"""A comparison consists of cells. A cell is the run of one configuration with one seed. If the run of a cell is
finished, the cell is not run again.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, PlanError, reading
from medsilo.core.parent_watch import end_family, end_with
from medsilo.core.text import plain
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan, keys_of
from medsilo.registry import METHODS
from medsilo.runs import paths
from medsilo.runs.reading import read_provenance
from medsilo.runs.schema import STOPPED, Summary
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import inprocess
from medsilo_lab.engines.tensorboard import event_files
from medsilo_server.record import Record, alone

ALONE, POOLED = "local", "central"
LET_GO = 30.0  # seconds within which the processes of a killed comparison must end
ANOTHER_FOLDER = "choose another -o, or --again for a new folder beside it"
ANOTHER = "another comparison runs it now; wait for its end, or give another --out"


@dataclass(frozen=True)
class Row:
    title: str
    changes: tuple[str, ...]

    @property
    def method(self) -> str | None:
        named = [change for change in self.changes if change.startswith("algorithm.name=")]
        name = named[-1].removeprefix("algorithm.name=") if named else None
        return METHODS.spelled(name) or name

    @property
    def federated(self) -> bool:
        """False for the reference methods, which are single-site and centralised training; true for all other
        methods.
        """
        return self.method not in (ALONE, POOLED)

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Parse a configuration: "method", "method:key=value:key=value" or "title: key=value key=value"."""
        title, colon, changes = text.partition(": ")
        if colon:
            return cls(title, tuple(changes.split()))
        name, *own = text.split(":")
        return cls(text, (f"algorithm.name={name}", *(f"algorithm.{change}" for change in own)))


# ---------------------------------------------------------------------------------------------------- normalisation
def kind_of(plan: Plan) -> tuple[str, str]:
    return plan.network.name, str(getattr(plan.network, "norm", "none"))


def unlike(plan: Plan, other: Plan) -> str | None:
    (mine, norm), (theirs, their_norm) = kind_of(plan), kind_of(other)
    if mine != theirs:
        return f"network {mine} instead of {theirs}"
    return None if norm == their_norm else f"normalisation layer {norm} instead of {their_norm}"


def with_local_pairs(rows: Sequence[Row], plans: Mapping[Row, Plan]) -> list[Row]:
    """If the comparison includes single-site training, each federated configuration is compared with a single-site
    configuration. Both configurations must have the same network and normalisation layers. Add single-site
    configurations that are missing.
    """
    found = list(rows)
    kinds = {row: kind_of(plan) for row, plan in plans.items()}
    for row in rows:
        own = [other for other in found if other.method == ALONE]
        if not row.federated or not own or any(kinds[other] == kinds[row] for other in own):
            continue
        network, norm = kinds[row]
        more = () if network == kinds[own[0]][0] else (f"network.name={network}",)
        if hasattr(plans[row].network, "norm"):
            more = (*more, f"network.norm={norm}")
        named = norm if len(more) == 1 else f"{network} {norm}"
        pair = Row(f"{own[0].title} ({named})", (*own[0].changes, *more))
        kinds[pair] = kinds[row]
        found.append(pair)
    return found


@dataclass(frozen=True)
class Cell:
    """A run of a comparison: a configuration's plan, a seed and, in cross-validation, a fold."""

    row: Row
    seed: int
    plan: Plan
    folder: Path

    @property
    def fold(self) -> int | None:
        return self.plan.task.fold.number if self.plan.task.fold else None

    @property
    def name(self) -> str:
        return f"{self.row.title}, seed {self.seed}{f', fold {self.fold}' if self.fold else ''}"

    def rounds_done(self) -> int | None:
        """Return the number of finished rounds of an active or stopped run, or None for any other run."""
        if not self.folder.is_dir() or (self.folder / paths.SUMMARY).exists():
            return None
        rounds = Record(self.folder).rounds()
        return rounds[-1].round if rounds else 0

    def differences(self) -> str:
        """Describe the differences between the plan of the cell and the plan of the run in the cell's folder. If the
        plans are equal, return an empty text.
        """
        return plan_differences(self.folder, self.plan)

    def summary(self) -> Summary | None:
        summary = Record(self.folder).finished()
        fits = summary and summary.plan_hash == self.plan.hash and summary.mean_test is not None
        return summary if fits else None


def cells_of(
    plan: Plan,
    rows: Sequence[Row],
    seeds: Sequence[int],
    changes: Sequence[str],
    folder: Path,
    folds: int | None = None,
) -> list[Cell]:
    """Return a cell for each run of a comparison, ordered by seed and fold; raise PlanError if a plan is invalid."""
    folders = [re.sub(r"[^\w.-]|_", "-", row.title) for row in rows]
    twice = next((row.title for row, name in zip(rows, folders, strict=True) if folders.count(name) > 1), None)
    if twice is not None:
        raise PlanError(f"two rows have the title {twice!r}; give one of them another title")
    cells = []
    numbers = range(1, folds + 1) if folds else (None,)
    for seed, fold, (row, name) in product(seeds, numbers, zip(rows, folders, strict=True)):
        turn = [f"task.fold={{number: {fold}, of: {folds}}}"] if fold else []
        own = plan_of(plan, row, [*changes, f"seed={seed}", *turn])
        cells.append(Cell(row, seed, own, folder / (f"{name}-{seed}-fold-{fold}" if fold else f"{name}-{seed}")))
    return cells


def plan_of(plan: Plan, row: Row, changes: Sequence[str]) -> Plan:
    """Return the plan of a configuration; if the plan is invalid, raise PlanError with the title of the
    configuration.
    """
    try:
        return plan.with_changes([*row.changes, *changes])
    except PlanError as error:
        raise PlanError(f"{row.title}: {error}") from error


def fill(
    cells: Sequence[Cell],
    settings: SiteSettings,
    at_once: int,
    done: Callable[[Cell, str], None],
    tensorboard: bool = False,
) -> None:
    """Start all unfinished runs, at most `at_once` at the same time. If one run fails, all other runs continue.

    Args:
        done: A function that receives each ended run with its failure, which is empty if the run succeeded.
        tensorboard: True to write TensorBoard's event files into the runs' folders.
    """
    left = [cell for cell in cells if not cell.summary()]
    for cell in left:
        for site in cell.plan.participation.everyone:
            cell.plan.task.check_source(settings.of(site).data)
    # runs that are started one after the other need no subprocesses, so a user's script needs no `if __name__ ==
    # "__main__"`
    if at_once == 1:
        for cell in left:
            done(cell, run_cell(cell, settings, tensorboard))
        return
    with ProcessPoolExecutor(at_once, get_context("spawn"), end_with, (os.getpid(),)) as pool:
        waiting = {pool.submit(run_cell, cell, settings, tensorboard): cell for cell in left}
        try:
            for future in as_completed(waiting):
                done(waiting[future], future.result())
        except BrokenProcessPool as error:
            raise MedsiloError(
                "a process of the comparison died, maybe from lack of memory; lower --at-once or training.batch_size, "
                "then repeat the same command to continue"
            ) from error
        except BaseException:  # an interrupt stops all runs, but the finished runs are kept
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                if worker.pid:
                    end_family(worker.pid)
            raise


def run_cell(cell: Cell, settings: SiteSettings, tensorboard: bool = False) -> str:
    """Start one run, or continue a stopped run. If the run fails, return a line with the reason; otherwise, return an
    empty text.

    If processes of an earlier, killed comparison still run, this function first waits for the end of those processes.
    """
    try:
        with alone(cell.folder.parent / paths.LOCKS / cell.folder.name, f"{cell.name}: {ANOTHER}", LET_GO):
            if differs := cell.differences():
                return f"{cell.folder.name} holds a run of another plan ({differs}); {ANOTHER_FOLDER}"
            if not Record(cell.folder).finished():
                resumes = _was_stopped(cell)
                if not resumes:
                    _discard(cell)
                with event_files(cell.folder, cell.plan.task.goal.metric, tensorboard) as on_round:
                    inprocess.run(cell.plan, folder=cell.folder, resume=resumes, settings=settings, on_round=on_round)
    except MedsiloError as error:
        return f"{error} {error.private}".rstrip()
    if not cell.summary():
        return (
            "no site has a test score: each has fewer test patients, or fewer of a class, than its "
            "min_patients_per_metric, or cases of one class only"
        )
    # After a run, its checkpoint is deleted. A checkpoint is as large as all models of the run together, and is needed
    # only to continue an unfinished run.
    shutil.rmtree(cell.folder / paths.CHECKPOINTS, ignore_errors=True)
    for state in cell.folder.glob(f"{paths.SITES}/*/{paths.STATE_FILES}"):
        state.unlink()
    return ""


def _was_stopped(cell: Cell) -> bool:
    """Return True if a run was stopped or killed and can be continued by this version of medsilo.

    A failed run cannot be continued, because its state may be damaged.
    """
    record = Record(cell.folder)
    if cell.plan.algorithm.pooled:
        return False
    try:
        if not record.can_go_on():
            return False
        summary, provenance = record.summary(), read_provenance(cell.folder)
        record.load_checkpoint()
    except MedsiloError:
        return False
    stopped = summary is None or summary.reason == STOPPED
    return stopped and provenance.code == cell.plan.code


def _discard(cell: Cell) -> None:
    """Remove the folder of an unfinished run that can't be continued, unless the folder has no plan."""
    if (cell.folder / paths.PLAN).exists():
        shutil.rmtree(cell.folder, ignore_errors=True)


def base_plan() -> dict[str, Any]:
    """Return the default plan of a comparison, with the method FedAvg. Every method of a comparison uses the task, the
    network and the training settings of the default plan.
    """
    return {
        "algorithm": {"name": "fedavg"},
        "task": {"name": "synthetic-histology"},
        "training": {"rounds": 10, "batch_size": 16, "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.0001},
        "participation": {"sites": ["hospital-a", "hospital-b", "hospital-c"]},
    }


# a description of differences names at most MOST_KEYS keys, and shortens each value to LONGEST_VALUE characters
MOST_KEYS, LONGEST_VALUE = 3, 80


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """For each key whose value differs, describe the old and the new value. If no value differs, return an empty text.
    A missing key has the value null.
    """
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    words = [f"{key} {_shown(old.get(key))}, now {_shown(new.get(key))}" for key in keys[:MOST_KEYS]]
    return "; ".join([*words, *([f"and {len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else [])])


def plan_differences(run: Path, plan: Plan) -> str:
    """Describe the differences between the plan `plan` and the plan of the run in the folder `run`. If the plans are
    equal or the folder contains no run, return an empty text.
    """
    path = run / paths.PLAN
    if not path.exists():
        return ""
    with reading(f"{paths.PLAN} of run {run.name}"):
        there = dict(keys_of(load_yaml(path.read_text(encoding="utf-8"))))
    return differences(there, dict(keys_of(json.loads(json.dumps(plan.resolved())))))


def _shown(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False), LONGEST_VALUE)
