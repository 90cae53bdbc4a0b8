"""medsilo compare: methods and seeds on one task, cell by cell, and the page that says what came out."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.study.cells import Cell, Engine, fill
from medsilo.study.tables import About, write_page

CELL_MEMORY = 4 << 30  # bytes that a cell may need: a few processes of torch and the sites' models
BAR = 20


def most_at_once() -> int:
    """Two cells side by side, where memory and processors allow."""
    room = psutil.virtual_memory().available // CELL_MEMORY
    return max(1, min(2, os.cpu_count() or 1, room))


@dataclass
class Study:
    """A comparison in its folder. Called again, it goes on where it was."""

    folder: Path
    about: About
    plan: Plan  # that the rows change
    cells: Sequence[Cell]

    def run(self, engine: Engine, settings: SiteSettings, at_once: int, say: Callable[[str], None]) -> list[str]:
        """Fill the cells and write the page after each; returns what failed."""
        failures: list[str] = []
        started, before = time.monotonic(), sum(1 for cell in self.cells if cell.summary())
        say(f"{len(self.cells)} runs, {before} of them finished before, {at_once} at a time, in {self.folder}")
        finished = before

        def done(cell: Cell, failure: str) -> None:
            nonlocal finished
            finished += 1
            if failure:
                failures.append(f"{cell.name}: {failure}")
            result = f"FAILED: {failure}" if failure else f"{cell.plan.task.metric} {cell.summary()['mean_test']:.4f}"
            left = (time.monotonic() - started) / (finished - before) * (len(self.cells) - finished)
            bar = "#" * (BAR * finished // len(self.cells))
            say(f"[{bar:.<{BAR}}] {finished}/{len(self.cells)}  {cell.name}: {result}  (about {_time(left)} left)")
            self.write(failures)

        fill(self.cells, engine, settings, at_once, done)
        self.write(failures)
        return failures

    def write(self, failures: Sequence[str]) -> Path:
        return write_page(self.folder, self.about, self.plan, self.cells, failures)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def shown(arguments: Sequence[str]) -> str:
    """The command as another person would give it: without the words about it, and without this machine's folders."""
    kept: list[str] = []
    arguments = iter(arguments)  # type: ignore[assignment]
    for argument in arguments:
        if argument in ("--title", "--notes", "--machine", "--out"):
            next(iter(arguments), None)
        elif argument == "--data":
            kept += [argument, "DATA"]
            next(iter(arguments), None)
        else:
            kept.append(argument)
    return "medsilo " + shlex.join(kept)
