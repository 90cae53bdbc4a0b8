"""A comparison as cells: one run for every row and seed. A finished cell is never run again."""

import json
import os
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
from medsilo.federation import inprocess
from medsilo.plan import Plan, keys_of
from medsilo.registry import METHODS
from medsilo.runs import paths
from medsilo.runs.reading import read_provenance
from medsilo.runs.record import Record, alone
from medsilo.runs.schema import STOPPED, Summary
from medsilo.site.settings import SiteSettings

ALONE, POOLED = "local", "central"  # what no federation makes; others are held against it
LET_GO = 30.0  # seconds in which processes of a comparison that was killed have ended
ANOTHER_FOLDER = "choose another -o, or --again for a new folder beside it"
ANOTHER = "another comparison runs it now; wait for its end, or give another --out"


@dataclass(frozen=True)
class Row:
    """One line of the comparison: its title and its changes to the plan."""

    title: str
    changes: tuple[str, ...]

    @property
    def method(self) -> str | None:
        """The method, if the row names one."""
        named = [change for change in self.changes if change.startswith("algorithm.name=")]
        name = named[-1].removeprefix("algorithm.name=") if named else None
        return METHODS.spelled(name) or name

    @property
    def federated(self) -> bool:
        """Return whether it is none of those that federations are held against."""
        return self.method not in (ALONE, POOLED)

    @classmethod
    def parse(cls, text: str) -> "Row":
        """A method, "method:key=value:key=value" with changes of its own section, or "title: key=value key=value"."""
        title, colon, changes = text.partition(": ")
        if colon:
            return cls(title, tuple(changes.split()))
        name, *own = text.split(":")
        return cls(text, (f"algorithm.name={name}", *(f"algorithm.{change}" for change in own)))


# ---------------------------------------------------------------------------------------------------- norms
def kind_of(plan: Plan) -> tuple[str, str]:
    """Return the network's name and its norm."""
    return plan.network.name, str(getattr(plan.network, "norm", "none"))


def unlike(one: Plan, other: Plan) -> str | None:
    """Return in words how the network of one plan differs from that of another; None if it does not."""
    (mine, norm), (theirs, their_norm) = kind_of(one), kind_of(other)
    if mine != theirs:
        return f"network {mine} instead of {theirs}"
    return None if norm == their_norm else f"normalisation layer {norm} instead of {their_norm}"


def with_local_pairs(rows: Sequence[Row], plans: Mapping[Row, Plan]) -> list[Row]:
    """Return the rows, and for each federation whose norm no local row has, a local row with that norm."""
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
    """One run: a row's plan with a seed, and with a fold where patients take turns in the test part."""

    row: Row
    seed: int
    plan: Plan
    folder: Path

    @property
    def fold(self) -> int | None:
        """The number of its fold, if patients take turns in the test part."""
        return self.plan.task.fold.number if self.plan.task.fold else None

    @property
    def name(self) -> str:
        return f"{self.row.title}, seed {self.seed}{f', fold {self.fold}' if self.fold else ''}"

    def rounds_done(self) -> int | None:
        """Return the rounds that are done of a run that goes on or was stopped; None of any other."""
        if not self.folder.is_dir() or (self.folder / paths.SUMMARY).exists():
            return None
        rounds = Record(self.folder).rounds()
        return rounds[-1].round if rounds else 0

    def differences(self) -> str:
        """Return how the plan of the run that was begun in this folder differs from this one; "" if it does not."""
        return plan_differences(self.folder, self.plan)

    def summary(self) -> Summary | None:
        """Return the finished run's summary, if it is one of this very plan and tells a score."""
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
    """All cells, seed by seed and fold by fold; a wrong plan is an error before anything starts."""
    folders = ["".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in row.title) for row in rows]
    twice = next((row.title for row, name in zip(rows, folders, strict=True) if folders.count(name) > 1), None)
    if twice is not None:
        raise PlanError(f"two rows are called {twice!r}; give each a title of its own")
    cells = []
    numbers = range(1, folds + 1) if folds else (None,)
    for seed, fold, (row, name) in product(seeds, numbers, zip(rows, folders, strict=True)):
        turn = [f"task.fold={{number: {fold}, of: {folds}}}"] if fold else []
        own = plan_of(plan, row, [*changes, f"seed={seed}", *turn])
        cells.append(Cell(row, seed, own, folder / (f"{name}-{seed}-fold-{fold}" if fold else f"{name}-{seed}")))
    return cells


def plan_of(plan: Plan, row: Row, changes: Sequence[str]) -> Plan:
    """Return the row's plan; a wrong one is an error that names the row."""
    try:
        return plan.with_changes([*row.changes, *changes])
    except PlanError as error:
        raise PlanError(f"{row.title}: {error}") from error


def fill(cells: Sequence[Cell], settings: SiteSettings, at_once: int, done: Callable[[Cell, str], None]) -> None:
    """Run the cells that are not finished, so many at a time; one that fails does not stop the others."""
    left = [cell for cell in cells if not cell.summary()]
    for cell in left:
        for site in cell.plan.participation.everyone:
            cell.plan.task.check_source(settings.of(site).data)
    if at_once == 1:  # here: a script needs no `if __name__ == "__main__"` then
        for cell in left:
            done(cell, run_cell(cell, settings))
        return
    with ProcessPoolExecutor(at_once, get_context("spawn"), end_with, (os.getpid(),)) as pool:
        waiting = {pool.submit(run_cell, cell, settings): cell for cell in left}
        try:
            for future in as_completed(waiting):
                done(waiting[future], future.result())
        except BrokenProcessPool as error:
            raise MedsiloError(
                "a process of the comparison died, maybe for want of memory; lower --at-once or training.batch_size, "
                "then the same compare again goes on"
            ) from error
        except BaseException:  # an interrupt: nothing goes on, and what was finished is kept
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                if worker.pid:
                    end_family(worker.pid)
            raise


def run_cell(cell: Cell, settings: SiteSettings) -> str:
    """Run one cell, or go on with it where it was stopped; what went wrong, in a line, or nothing.

    A process of an earlier comparison, which is ending, is waited for.
    """
    try:
        with alone(cell.folder.parent / paths.LOCKS / cell.folder.name, f"{cell.name}: {ANOTHER}", LET_GO):
            if differs := cell.differences():
                return f"{cell.folder.name} holds a run of another plan ({differs}); {ANOTHER_FOLDER}"
            if not Record(cell.folder).finished():
                resumes = _was_stopped(cell)
                if not resumes:
                    _discard(cell)
                inprocess.run(cell.plan, folder=cell.folder, resume=resumes, settings=settings)
    except MedsiloError as error:
        return f"{error} {error.private}".rstrip()
    if not cell.summary():
        return "every site suppresses its test score: each has fewer test patients than its min_patients_per_metric"
    # Only for going on with a run, and as large as all its models.
    shutil.rmtree(cell.folder / paths.CHECKPOINTS, ignore_errors=True)
    for state in cell.folder.glob(f"{paths.SITES}/*/{paths.STATE_FILES}"):
        state.unlink()
    return ""


def _was_stopped(cell: Cell) -> bool:
    """Return whether a cell was stopped or killed in its middle, and the same medsilo can go on with it.

    One that failed starts again: it may be its state that is damaged.
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
    """Remove a run of this very plan that did not end and can't go on; a folder that is no run's stays as it is."""
    if (cell.folder / paths.PLAN).exists():
        shutil.rmtree(cell.folder, ignore_errors=True)


def base_plan() -> dict[str, Any]:
    """FedAvg: the plan that rows change where nobody gives one, with one task, network and training for all methods."""
    return {
        "algorithm": {"name": "fedavg"},
        "task": {"name": "synthetic-histology"},
        "training": {"rounds": 10, "batch_size": 16, "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.0001},
        "participation": {"sites": ["hospital-a", "hospital-b", "hospital-c"]},
    }


MOST_KEYS, LONGEST_VALUE = 3, 80  # in one line


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the keys whose values differ, each with both values; "" where none does. A key that lacks is null."""
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    words = [f"{key} {_shown(old.get(key))}, now {_shown(new.get(key))}" for key in keys[:MOST_KEYS]]
    return "; ".join([*words, *([f"and {len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else [])])


def plan_differences(run: Path, plan: Plan) -> str:
    """Return how the plan of the run in a folder differs from this one; "" where it does not, or no run began there."""
    path = run / paths.PLAN
    if not path.exists():
        return ""
    with reading(f"{paths.PLAN} of run {run.name}"):
        there = dict(keys_of(load_yaml(path.read_text(encoding="utf-8"))))
    return differences(there, dict(keys_of(json.loads(json.dumps(plan.resolved())))))


def _shown(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False), LONGEST_VALUE)
