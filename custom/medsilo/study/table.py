"""A table of plans x seeds, run in processes of its own, cell by cell; finished cells are kept.

    python -m medsilo.study.table PLAN OUT.md --rows fedavg "harmofl: algorithm.name=harmofl" --seeds 0 1 2

A row is a method's name, or "title: key=value key=value" of changes to the plan. Every cell is a run folder under
--runs; a cell whose summary says "finished" is not run again, so a table that was stopped goes on where it was.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from medsilo.errors import MedsiloError
from medsilo.files import write_text
from medsilo.plan import Plan, load_plan
from medsilo.site.settings import SiteSettings
from medsilo.study import inprocess


@dataclass(frozen=True)
class Row:
    """One line of the table: its title and its changes to the plan."""

    title: str
    changes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Row":
        title, colon, changes = text.partition(": ")
        return cls(title, tuple(changes.split()) if colon else (f"algorithm.name={title}",))

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.title)


@dataclass(frozen=True)
class Cell:
    """One run: a row's plan with a seed."""

    row: Row
    seed: int
    plan: Plan
    folder: Path

    def summary(self) -> dict[str, Any]:
        """The finished run's summary, if it is one of this very plan; else nothing."""
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        whole = summary.get("status") == "finished" and summary.get("plan_hash") == self.plan.hash
        return summary if whole else {}


def cells_of(plan: Path, rows: Sequence[Row], seeds: Sequence[int], runs: Path, changes: Sequence[str]) -> list[Cell]:
    """All cells, seed by seed; a wrong plan is an error before anything starts."""
    return [
        Cell(row, seed, load_plan(plan, [*changes, *row.changes, f"seed={seed}"]), runs / f"{row.folder}-{seed}")
        for seed in seeds
        for row in rows
    ]


def fill(cells: Sequence[Cell], settings: SiteSettings, processes: int, done: Callable[[Cell, str], None]) -> None:
    """Run the cells that are not finished, so many at a time."""
    open_cells = [cell for cell in cells if not cell.summary()]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting = {pool.submit(_run, cell, settings): cell for cell in open_cells}
        for future in as_completed(waiting):
            done(waiting[future], future.result())


def _run(cell: Cell, settings: SiteSettings) -> str:
    """Run one cell; what went wrong, in a line, or nothing."""
    shutil.rmtree(cell.folder, ignore_errors=True)
    try:
        inprocess.run(cell.plan, folder=cell.folder, settings=settings)
    except MedsiloError as error:
        return str(error)
    return ""


def table(cells: Sequence[Cell]) -> list[str]:
    """Markdown: per row the mean over seeds of the sites' test scores and of their mean, and the spread."""
    rows = list(dict.fromkeys(cell.row for cell in cells))
    sites = sorted({site for cell in cells for site in cell.plan.participation.sites})
    first = cells[0].plan
    metric, tracked = first.task.metric, getattr(first.network, "norm", "none")
    lines = [
        f"Test {metric} in %, mean ± standard deviation over seeds. Network `{first.network.name}`, norm `{tracked}` "
        "unless the row says otherwise.",
        "",
        f"| row | mean over sites | lowest, highest seed | {' | '.join(sites)} | minutes a run |",
        f"|---|---|---|{'---|' * len(sites)}---|",
    ]
    for row in rows:
        found = [summary for cell in cells if cell.row == row and (summary := cell.summary())]
        means = [100 * summary["mean_test"] for summary in found]
        by_site = [[100 * summary["sites"][site]["test"][metric] for summary in found] for site in sites]
        spread = f"{min(means):.1f}, {max(means):.1f}" if means else "–"
        minutes = f"{statistics.mean(summary['seconds'] for summary in found) / 60:.1f}" if found else "–"
        scores = " | ".join(map(_score, by_site))
        lines.append(f"| {row.title} | {_score(means)} | {spread} | {scores} | {minutes} |")
    lines += ["", *(f"* **{row.title}**: `{' '.join(row.changes)}`" for row in rows)]
    return lines


def _score(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def write(
    path: Path, title: str, command: str, machine: str, cells: Sequence[Cell], failures: Sequence[str], notes: str
) -> None:
    """The table as a page: what was run, where, how long, what came out."""
    finished = [cell for cell in cells if cell.summary()]
    hours = sum(cell.summary()["seconds"] for cell in finished) / 3600
    stamp = time.strftime("%Y-%m-%d", time.gmtime())
    parts = [
        f"# {title}",
        "",
        *([notes, ""] if notes else []),
        f"{len(finished)} of {len(cells)} runs are finished; {hours:.2f} hours of runs in all. Machine: {machine}. "
        f"Python {platform.python_version()}, {stamp}.",
        "",
        *(table(cells) if cells else []),
        *(["", "Failed:", "", *(f"* {failure}" for failure in failures)] if failures else []),
        "",
        "## How to repeat it",
        "",
        "```",
        command,
        "```",
        "",
        "The plan that the rows change:",
        "",
        "```yaml",
        cells[0].plan.to_yaml().rstrip(),
        "```",
    ]
    write_text(path, "\n".join(parts) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a table and write it after every cell."""
    parser = argparse.ArgumentParser(prog="python -m medsilo.study.table", description="A table of plans x seeds.")
    parser.add_argument("plan", type=Path, help="the plan.yaml that the rows change")
    parser.add_argument("out", type=Path, help="the markdown page to write")
    parser.add_argument("--rows", nargs="+", required=True, help='a method, or "title: key=value key=value"')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the plan of all rows")
    parser.add_argument("--runs", type=Path, default=None, help="where cells are kept (default: runs/<name of OUT>)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", type=Path, default=None, help="folder with the sites' data, for tasks that need one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--title", default="Results")
    parser.add_argument("--notes", default="", help="a paragraph for the page")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores")
    options = parser.parse_args(arguments)
    settings = SiteSettings(device=options.device, data=options.data)
    runs = options.runs or Path("runs") / options.out.stem
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = _command(given)
    failures: list[str] = []
    try:
        cells = cells_of(options.plan, [Row.parse(text) for text in options.rows], options.seeds, runs, options.set)
    except MedsiloError as error:
        print(f"table: {error}", file=sys.stderr)
        return 1

    def done(cell: Cell, failure: str) -> None:
        if failure:
            failures.append(f"{cell.row.title}, seed {cell.seed}: {failure}")
        score = cell.summary().get("mean_test")
        print(f"{cell.row.title}, seed {cell.seed}: {failure or score}", flush=True)
        write(options.out, options.title, command, options.machine, cells, failures, options.notes)

    fill(cells, settings, options.processes, done)
    write(options.out, options.title, command, options.machine, cells, failures, options.notes)
    return 1 if failures else 0


def _command(arguments: Sequence[str]) -> str:
    """The command line as a person would write it, without what only this machine knows."""
    shown: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument in ("--notes", "--machine", "--title", "--runs"):
            skip = not skip
            continue
        if shown and shown[-1] == "--data":
            argument = "DATA"
        shown.append(f'"{argument}"' if " " in argument else argument)
    return "python -m medsilo.study.table " + " ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
