"""The runs of the adviser's proof: every method on every federation, kept in folders so that a stop costs one run."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.advise.federations import Federation, Kind, plan_of, write
from medsilo.core.files import write_json
from medsilo.site.owner import ALL_MINE
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.study.cells import Cell, Row, cells_of, run_cell
from medsilo.study.committee import committee_scores

METHODS = ("local", "fedavg", "fedbn", "fedper", "ditto", "fine-tuning", "adafed", "fedsm")
OF_IMAGES = ("harmofl",)
SEEDS: Mapping[Kind, tuple[int, ...]] = {"table": (0, 1), "image": (0,)}  # images cost eight times as much


def methods_of(kind: Kind) -> tuple[str, ...]:
    """Return the methods that a federation of this kind can train with."""
    return (*METHODS, *(OF_IMAGES if kind == "image" else ()))


@dataclass(frozen=True)
class Trial:
    """A federation with its files and its cells."""

    federation: Federation
    folder: Path
    cells: Sequence[Cell]

    @classmethod
    def of(cls, federation: Federation, seeds: Sequence[int], place: Path) -> "Trial":
        """Return the trial; its files are written where they are not there."""
        folder = place / federation.name
        if not (folder / "data").is_dir():
            shutil.rmtree(folder / "new", ignore_errors=True)
            write(federation, folder / "new")
            (folder / "new").rename(folder / "data")
        rows = [Row.parse(method) for method in methods_of(federation.kind)]
        return cls(federation, folder, cells_of(plan_of(federation), rows, seeds, [], folder / "runs"))

    @property
    def settings(self) -> SiteSettings:
        """Return every hospital's settings: nothing here is a patient's."""
        own = {"data": str(self.folder / "data"), "public_data": True, "share_personal_model": True, "device": "cpu"}
        return make_settings({**ALL_MINE, **own}, "benchmarks.advise")

    @property
    def methods(self) -> list[str]:
        """The methods, in turn."""
        return list(dict.fromkeys(cell.row.title for cell in self.cells))

    @property
    def seeds(self) -> list[int]:
        """The seeds of training; the data are the same for all."""
        return list(dict.fromkeys(cell.seed for cell in self.cells))

    def together(self, methods: Sequence[str], seed: int) -> list[float]:
        """Return every hospital's test score of these methods' models that answer together; kept for the next time."""
        kept = self.folder / f"together-{'-'.join(methods)}-{seed}.json"
        if not kept.is_file():
            runs = {cell.row.title: cell.folder for cell in self.cells if cell.seed == seed}
            scores, _ = committee_scores([runs[method] for method in methods], self.settings)
            write_json(kept, list(scores.values()))
        return json.loads(kept.read_text("utf-8"))

    @property
    def done(self) -> bool:
        """Return whether every cell is finished."""
        return all(cell.summary() for cell in self.cells)

    def run(self, until: float | None) -> Iterator[str]:
        """Run what is not done, and yield what failed; no run begins after `until`."""
        for cell in self.cells:
            if cell.summary() or (until is not None and time.monotonic() >= until):
                continue
            if failure := run_cell(cell, "inprocess", self.settings):
                yield f"{self.federation.name}, {cell.name}: {failure}"
