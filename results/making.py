"""Run the cells of a page seed by seed, and store each cell in a folder, so that a stopped program can continue."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.brains import write_heads
from medsilo.core.files import write_json
from medsilo.runs import paths
from medsilo.site.settings import ALL_MINE, SiteSettings, make_settings
from medsilo_lab.comparison.compare import Asked
from medsilo_lab.comparison.reuse import ComparisonFacts
from medsilo_lab.study.cells import Cell, Row, run_cell
from medsilo_lab.study.reading_once import keeping_ready
from medsilo_lab.study.verdict import Statistics
from medsilo_lab.study.verdict_file import About, Verdict
from results.har import write_windows
from results.looks import look_of, looking
from results.pages import BRAINS, BRCA, HAR, HEART, IMPACT, Page, Part
from results.patients import write_patients, write_studies
from results.sites import differing
from results.stress import write_stress

ROOT = Path(__file__).resolve().parents[1]
READY = "ready"  # suffix of the folder with preprocessed images; this folder lies next to the part's folder


@dataclass(frozen=True)
class Places:
    cells: Path
    data: Path


@dataclass
class Comparison:
    part: Part
    folder: Path
    cells: Sequence[Cell]

    @classmethod
    def of(cls, page: str, part: Part, places: Places) -> "Comparison":
        name = part.name if part.shift is None else f"{part.name}-{part.shift}"
        folder = places.cells / page / name
        asked = Asked(
            task=part.task or None,
            plan=ROOT / part.plan if part.plan else None,
            methods=(),
            row=part.rows,
            seeds=range(part.seeds),
            changes=part.changes,
            out=folder,
            folds=part.folds,
        )
        return cls(part, folder, asked.all_cells())

    def turn(self, row: Row) -> int:
        """Return the position of a row in the order of runs. Rows with position 0 run together, seed by seed; all other
        rows run afterwards, one row after the other.
        """
        names = (row.title, row.method)
        return next((turn for turn, name in enumerate(self.part.later, 1) if name in names), 0)

    @property
    def first(self) -> list[Cell]:
        return [cell for cell in self.cells if not self.turn(cell.row)]

    def whole_seeds(self) -> list[int]:
        """Return the seeds for which all rows are finished, apart from the rows that run last."""
        left = {cell.seed for cell in self.first if not cell.summary()}
        return [seed for seed in dict.fromkeys(cell.seed for cell in self.cells) if seed not in left]

    def compared(self) -> list[Cell]:
        seeds = self.whole_seeds()
        own = [cell for cell in self.cells if cell.seed in seeds]
        left = {cell.row for cell in own if not cell.summary()}
        return [cell for cell in own if cell.row not in left]

    def settings(self, places: Places) -> SiteSettings:
        source = places.data / self.part.data if self.part.data else None
        if source and self.part.data == HAR:
            source = write_windows(source, self.folder / "windows", self.part.shift)
        elif source and self.part.data in (HEART, BRCA):
            source = write_patients(source, self.folder / "tables")
        elif source and self.part.data == IMPACT:
            source = write_studies(source, self.folder / "tables")
        elif source and self.part.stress:
            source = write_stress(source, self.folder / "hospitals", self.part.stress)
        elif self.part.data == BRAINS:
            source = write_heads(self.folder / "heads")
        return make_settings({**ALL_MINE, "data": source, "device": "cpu"}, "results")

    def begin(self) -> None:
        """Mark the folder as a comparison's folder, so that a stopped comparison continues."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / paths.COMPARISON, ComparisonFacts(settings={}).model_dump())

    def ready(self, settings: SiteSettings, row: Row) -> SiteSettings:
        """Return settings with which rows whose images have the same appearance share their prepared images."""
        folder = self.folder.with_name(f"{self.folder.name}-{READY}") / (look_of(row.title) or "plain")
        folder.mkdir(parents=True, exist_ok=True)
        return keeping_ready(settings, self.cells[0].plan.task, folder)

    def verdict(self, baseline: str) -> Verdict:
        return Statistics(self.compared(), baseline).verdict(About(title=self.part.title), [])


def comparisons(name: str, page: Page, places: Places, shift: int | None = None) -> list[Comparison]:
    parts = [
        replace(part, shift=shift) if shift is not None and part.shift is not None else part for part in page.parts
    ]
    return [Comparison.of(name, part, places) for part in parts]


def make(parts: Sequence[Comparison], places: Places, until: float | None, seeds: int | None = None) -> list[str]:
    """Run the missing cells of all parts in the order of seeds, and return the failures; the cells of rows in `later`
    run last.

    No run starts after the time `until`. With `seeds`, the program runs only this number of seeds.
    """
    order = sorted(
        ((part, cell) for part in parts for cell in part.cells if seeds is None or cell.seed < seeds),
        key=lambda pair: (pair[0].turn(pair[1].row), pair[1].seed),
    )
    left = [(part, cell) for part, cell in order if not cell.summary()]
    settings: dict[int, SiteSettings] = {}
    failures = []
    for number, (part, cell) in enumerate(left, 1):
        if until is not None and time.monotonic() >= until:
            break
        if id(part) not in settings:
            part.begin()
            settings[id(part)] = part.settings(places)
        with looking(cell.row.title), differing(part.part.made_up):
            failure = run_cell(cell, part.ready(settings[id(part)], cell.row))
        summary = cell.summary()
        told = f"{summary.mean_test:.4f}, {summary.seconds:.0f} s" if summary else f"FAILED: {failure}"
        where = f"{part.folder.parent.name}/{part.folder.name}"
        print(
            f"{time.strftime('%H:%M:%S')} {number}/{len(left)} {where}: {cell.name}: {told}",
            file=sys.stderr,
            flush=True,
        )
        if failure:
            failures.append(f"{part.part.title}: {cell.name}: {failure}")
    return failures
