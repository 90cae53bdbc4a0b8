"""Run every configuration of a comparison once per seed, and write the page of results."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import write_json
from medsilo.core.text import counted, duration
from medsilo.flare import jobs
from medsilo.plan import Plan, parse_plan
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from medsilo_lab.comparison import reuse
from medsilo_lab.report.run_warnings import runs_of, warnings
from medsilo_lab.study.cells import (
    ANOTHER,
    Cell,
    Row,
    base_plan,
    cells_of,
    fill,
    plan_of,
    with_local_pairs,
)
from medsilo_lab.study.reading_once import images_ready
from medsilo_lab.study.verdict import Statistics, chosen_baseline
from medsilo_lab.study.verdict_file import About, Notice, RunOfRow, Verdict
from medsilo_server.record import alone

CELL_MEMORY = 4 << 30  # assumed memory of a run and its torch processes, in bytes
BAR = 20
SELDOM = 10  # pause between two updates of the page, as a multiple of the time that one update takes


def most_at_once() -> int:
    """Return the maximum number of simultaneous runs: two if memory and processors suffice for two, otherwise one."""
    room = psutil.virtual_memory().available // CELL_MEMORY
    return max(1, min(2, os.cpu_count() or 1, room))


@dataclass
class Study:
    """A comparison and its folder. A second call of `run` continues a stopped comparison."""

    folder: Path
    about: About
    cells: Sequence[Cell]
    # title of the configuration with which all other configurations are compared; by default the title of FedAvg
    baseline: str | None = None
    show: Callable[[], object] = lambda: None
    settings: SiteSettings = field(default_factory=SiteSettings)
    at_once: int = 1
    say: Callable[[str], object] = lambda line: None
    # a function that receives a line of text about each finished run; by default `say`
    each: Callable[[str], object] | None = None
    tensorboard: bool = False  # true if the runs also write TensorBoard's event files
    finished: str = ""  # progress bar of finished runs, with the remaining time

    def run(self) -> list[str]:
        with self._begun():
            return self._fill()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Lock the folder of the comparison until the `with` block ends, and read the images once for all runs."""
        chosen_baseline([cell.row for cell in self.cells], self.baseline)
        # a folder without a comparison must be rejected before the lock file is written into the folder
        reuse.check_free(self.folder)
        with alone(self.folder / paths.LOCKS / "comparison", f"{self.folder.name}: {ANOTHER}"):
            reuse.begin(self.folder, self.cells, self.settings)
            left, own = [cell.plan for cell in self.cells if not cell.summary()], self.settings
            with images_ready(left, own, self.at_once, self.say) as self.settings:
                try:
                    yield
                finally:
                    self.settings = own

    def _fill(self) -> list[str]:
        failures: list[str] = []
        started, before = time.monotonic(), sum(1 for cell in self.cells if cell.summary())
        rounds = sum(cell.plan.rounds for cell in self.cells if not cell.summary())
        self.say(
            f"{counted(len(self.cells), 'run')}, {before} of them finished before, {self.at_once} at a time, {rounds} "
            f"rounds in all, in {self.folder}"
        )
        finished, due = before, 0.0

        def done(cell: Cell, failure: str) -> None:
            nonlocal finished, due
            finished += 1
            if failure:
                failures.append(f"{cell.name}: {failure}")
            summary = None if failure else cell.summary()
            result = f"{summary.metric} {summary.mean_score}" if summary else f"FAILED: {failure}"
            left = (time.monotonic() - started) / (finished - before) * (len(self.cells) - finished)
            bar = "#" * (BAR * finished // len(self.cells))
            self.finished = f"[{bar:.<{BAR}}] {finished}/{len(self.cells)}"
            (self.each or self.say)(f"{self.finished}  {cell.name}: {result}  (about {duration(left)} left)")
            self.finished += f", about {duration(left)} left"
            if (now := time.monotonic()) >= due:
                self.conclude(failures)
                self.show()
                due = time.monotonic() + SELDOM * (time.monotonic() - now)

        fill(self.cells, self.settings, self.at_once, done, self.tensorboard)
        self.conclude(failures)
        return failures

    def under_way(self) -> str:
        running = "; ".join(
            f"{cell.name}: {f'round {done}/{cell.plan.rounds}' if done else 'starting'}"
            for cell in self.cells
            if (done := cell.rounds_done()) is not None
        )
        return "; ".join(filter(None, (self.finished, running)))

    def conclude(self, failures: Sequence[str]) -> Verdict:
        about = self.about.changed(cells=len(self.cells), failures=list(failures))
        runs = [
            RunOfRow(row=cell.row.title, seed=cell.seed, run=cell.folder.name, fold=cell.fold)
            for cell in self.cells
            if cell.summary()
        ]
        statistics = Statistics(self.cells, self.baseline)
        verdict = statistics.verdict(about, runs)
        odd = [Notice(kind="caution", word="No number", text=f"{line}; it is left out.") for line in statistics.odd]
        verdict = verdict.changed(warnings=[*odd, *warnings(runs_of(self.folder, verdict), about.failures)])
        if len(runs) + len(failures) < len(self.cells):
            verdict = verdict.changed(
                headline=f"So far, with {len(runs)} of {len(self.cells)} runs: {verdict.headline}"
            )
        write_json(self.folder / paths.VERDICT, verdict.as_json())
        return verdict


# ---------------------------------------------------------------------------------------------------- the request
@dataclass(frozen=True)
class Asked:
    task: str | None
    plan: Path | None
    methods: Sequence[str]
    row: Sequence[str]
    seeds: Sequence[int]
    changes: Sequence[str]
    out: Path
    folds: int | None = None

    def all_cells(self) -> list[Cell]:
        """Return all runs of the comparison; raise MedsiloError if a plan is invalid."""
        reuse.check_free(self.out)
        task = [f"task.name={self.task}"] if self.task else []
        plan = jobs.plan_of(self.plan, task, local=True) if self.plan else parse_plan(base_plan(), task)
        named = [text.strip() for text in ",".join(self.methods).split(",")]
        if spaced := next((text for text in named if " " in text and ":" not in text), ""):
            raise MedsiloError(f"--methods {spaced!r}: separate methods by commas, {','.join(spaced.split())}")
        rows = [Row.parse(text) for text in [*named, *self.row] if text]
        if not rows:
            raise MedsiloError("nothing to compare; give --methods local,fedavg or --row 'title: key=value'")
        rows = comparable(plan, rows, self.changes)
        return cells_of(plan, rows, self.seeds, self.changes, self.out, self.folds)


def comparable(plan: Plan, rows: Sequence[Row], changes: Sequence[str]) -> list[Row]:
    """Adapt the configurations of a comparison to the plan, and add missing configurations for single-site training.
    Federated and single-site training are compared with equal normalisation layers, so each kind of normalisation layer
    needs its own configuration for single-site training.
    """
    rows = [_suited(row, plan, changes) for row in rows]
    return with_local_pairs(rows, {row: plan_of(plan, row, changes) for row in rows})


def _suited(row: Row, plan: Plan, changes: Sequence[str]) -> Row:
    """Return the configuration, or a changed configuration if the method does not support the plan.

    In the changed configuration, evaluation sites are left out, or batch norm is used, or both changes are made.
    """
    try:
        plan_of(plan, row, changes)
    except PlanError:
        for more in (
            ("participation.evaluation_sites=[]",),
            ("network.norm=batch",),
            ("participation.evaluation_sites=[]", "network.norm=batch"),
        ):
            own = replace(row, changes=(*row.changes, *more))
            with suppress(PlanError):
                plan_of(plan, own, changes)
                return own
    return row
