"""medsilo compare: methods and seeds on one task, cell by cell, and the page that says what came out."""

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
from medsilo.runs.record import alone
from medsilo.site.settings import SiteSettings
from medsilo_lab.study import reuse
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
from medsilo_lab.study.verdict_file import About, RunOfRow, Verdict

CELL_MEMORY = 4 << 30  # bytes that a cell may need: a few processes of torch and the sites' models
BAR = 20
SELDOM = 10  # times what a page takes, before the next is written while runs go on


def most_at_once() -> int:
    """Two cells side by side, where memory and processors allow."""
    room = psutil.virtual_memory().available // CELL_MEMORY
    return max(1, min(2, os.cpu_count() or 1, room))


@dataclass
class Study:
    """A comparison in its folder. Called again, it goes on where it was."""

    folder: Path
    about: About
    cells: Sequence[Cell]
    against: str | None = None  # the row that all are held against; by default FedAvg's
    show: Callable[[], object] = lambda: None  # writes the page, after each run
    settings: SiteSettings = field(default_factory=SiteSettings)
    at_once: int = 1  # cells side by side
    say: Callable[[str], object] = lambda line: None

    def run(self) -> list[str]:
        """Fill the cells and write the page after each; returns what failed."""
        with self._begun():
            return self._fill()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Inside, the folder is this comparison's, no other one runs in it, and images are read once for all runs."""
        chosen_baseline([cell.row for cell in self.cells], self.against)
        reuse.check_free(self.folder)  # before a lock is put into a folder of other things
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
            result = f"{summary.metric} {summary.mean_test:.4f}" if summary else f"FAILED: {failure}"
            left = (time.monotonic() - started) / (finished - before) * (len(self.cells) - finished)
            bar = "#" * (BAR * finished // len(self.cells))
            told = f"[{bar:.<{BAR}}] {finished}/{len(self.cells)}  {cell.name}: {result}"
            self.say(f"{told}  (about {duration(left)} left)")
            if (now := time.monotonic()) >= due:
                self.conclude(failures)
                self.show()
                due = time.monotonic() + SELDOM * (time.monotonic() - now)

        fill(self.cells, self.settings, self.at_once, done)
        self.conclude(failures)
        return failures

    def under_way(self) -> str:
        """Return which runs go on, and how far they are."""
        return ", ".join(
            f"{cell.name} ({f'round {done} of {cell.plan.rounds} is over' if done else 'starting'})"
            for cell in self.cells
            if (done := cell.rounds_done()) is not None
        )

    def conclude(self, failures: Sequence[str]) -> Verdict:
        """Write the statistics of what is finished into verdict.json and the page."""
        about = self.about.changed(cells=len(self.cells), failures=list(failures))
        runs = [
            RunOfRow(row=cell.row.title, seed=cell.seed, run=cell.folder.name, fold=cell.fold)
            for cell in self.cells
            if cell.summary()
        ]
        verdict = Statistics(self.cells, self.against).verdict(about, runs)
        if len(runs) + len(failures) < len(self.cells):
            verdict = verdict.changed(
                headline=f"So far, with {len(runs)} of {len(self.cells)} runs: {verdict.headline}"
            )
        write_json(self.folder / paths.VERDICT, verdict.as_json())
        return verdict


# ---------------------------------------------------------------------------------------------------- asking
@dataclass(frozen=True)
class Asked:
    """The comparison that a person asks for, as it was written."""

    task: str | None
    plan: Path | None  # a plan or a job's folder
    methods: Sequence[str]
    row: Sequence[str]
    seeds: Sequence[int]
    changes: Sequence[str]
    out: Path
    folds: int | None = None

    def all_cells(self) -> list[Cell]:
        """Return the cells; a wrong plan is an error before anything starts."""
        reuse.check_free(self.out)
        task = [f"task.name={self.task}"] if self.task else []
        plan = jobs.plan_of(self.plan, task, here=True) if self.plan else parse_plan(base_plan(), task)
        named = [text.strip() for text in ",".join(self.methods).split(",")]
        if spaced := next((text for text in named if " " in text and ":" not in text), ""):
            raise MedsiloError(f"--methods {spaced!r}: separate methods by commas, {','.join(spaced.split())}")
        rows = [Row.parse(text) for text in [*named, *self.row] if text]
        if not rows:
            raise MedsiloError("nothing to compare; give --methods local,fedavg or --row 'title: key=value'")
        rows = comparable(plan, rows, self.changes)
        return cells_of(plan, rows, self.seeds, self.changes, self.out, self.folds)


def comparable(plan: Plan, rows: Sequence[Row], changes: Sequence[str]) -> list[Row]:
    """Return rows that the plan suits, and a local row for each federation whose norm no local row has."""
    rows = [_suited(row, plan, changes) for row in rows]
    return with_local_pairs(rows, {row: plan_of(plan, row, changes) for row in rows})


def _suited(row: Row, plan: Plan, changes: Sequence[str]) -> Row:
    """Return the row; one that the plan does not suit leaves out hospitals that don't train, where its method has no
    model for them, and takes batch norm, where its method needs that."""
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
