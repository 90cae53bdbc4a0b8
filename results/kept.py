"""Store the scores of single patients; each part of a study has one file in results/scores.

For each test case of each hospital, the file has the score of every seed and configuration, and a number that
identifies the case's patient. The file's header has the training conditions and the validation score of each
configuration.
"""

import csv
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.study.cells import ALONE, Cell, Row, kind_of
from medsilo_lab.study.evidence import Scores, Study, joined
from medsilo_lab.study.verdict import Statistics
from results import result_files
from results.ensembles import ensemble_scores
from results.looks import look_of
from results.pages import ENSEMBLE

FOLDER = result_files.FOLDER / "scores"
COLUMNS = ("configuration", "site", "patient")
SEED = "seed "
AVERAGES = ("uniform", "cases", "patients")


@dataclass(frozen=True)
class Terms:
    """The training conditions that must be equal in both configurations of a contrast."""

    images: str
    weighting: str  # rule for the hospitals' weights in a mean; "own" stands for the method's own rule
    network: str
    epochs: int  # training epochs of a round, summed over all networks

    @classmethod
    def of(cls, row: Row, plan: Plan) -> "Terms":
        mean = not plan.algorithm.pooled and row.method != ALONE and plan.algorithm.weighting in AVERAGES
        return cls(
            look_of(row.title) or "as they are",
            str(plan.algorithm.weighting) if mean else "own",
            ", ".join(kind_of(plan)),
            plan.training.local_epochs,
        )

    def unlike(self, other: "Terms") -> list[str]:
        found = [name for name in ("images", "network") if getattr(self, name) != getattr(other, name)]
        weighed = {self.weighting, other.weighting} - {"own"}
        return [*found, *(["weighting"] if len(weighed) > 1 else [])]


@dataclass(frozen=True)
class Kept:
    part: str
    metric: str
    seeds: tuple[int, ...]
    terms: Mapping[str, Terms]
    validation: Mapping[str, float]  # mean validation score over hospitals and seeds, if the study has validation cases
    scores: Mapping[str, Study]

    @classmethod
    def of(cls, part: str, cells: Sequence[Cell], settings: SiteSettings, ensemble: bool) -> "Kept":
        found = Statistics(cells, None)
        seeds = tuple(sorted({cell.seed for cell in cells}))
        scores: dict[str, Study] = {row.title: [own[seed] for seed in seeds] for row, own in found.scores.items()}
        terms = {row.title: Terms.of(row, found.cells[row, seeds[0]].plan) for row in found.rows}
        told = {row.title: known for row in found.rows if (known := _validation(cells, row)) is not None}
        together = [_together(cells, seed, settings) for seed in seeds] if ensemble else []
        if together and all(together):
            scores[ENSEMBLE], terms[ENSEMBLE] = together, terms[ALONE]
        return cls(part, cells[0].plan.task.goal.metric, seeds, terms, told, scores)

    @classmethod
    def read(cls, path: Path) -> "Kept":
        header, rows = result_files.header_of(path), result_files.rows_of(path)
        seeds = tuple(int(one) for one in header["seeds"][0].split(","))
        terms = {name: Terms(**json.loads(said)) for name, said in map(_parted, header["configuration"])}
        validation = {name: float(said) for name, said in map(_parted, header.get("validation", []))}
        scores: dict[str, Study] = {}
        for name in terms:
            own = [row for row in rows if row["configuration"] == name]
            scores[name] = [
                {
                    site: Scores(
                        np.array([float(row[f"{SEED}{seed}"]) for row in own if row["site"] == site]),
                        np.array([int(row["patient"]) for row in own if row["site"] == site]),
                    )
                    for site in dict.fromkeys(row["site"] for row in own)
                }
                for seed in seeds
            ]
        return cls(header["part"][0], header["metric"][0], seeds, terms, validation, scores)

    def text(self) -> str:
        out = io.StringIO()
        for name, said in self._header():
            out.write(f"# {name}: {said}\n")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*COLUMNS, *(f"{SEED}{seed}" for seed in self.seeds)])
        for name, study in self.scores.items():
            for site in sorted(study[0]):
                columns = np.array([own[site].values for own in study]).T
                for patient, values in zip(study[0][site].patients, columns, strict=True):
                    writer.writerow([name, site, patient, *(f"{value:.4g}" for value in values)])
        return out.getvalue()

    def _header(self) -> Iterator[tuple[str, str]]:
        yield "part", self.part
        yield "metric", self.metric
        yield "seeds", ",".join(map(str, self.seeds))
        for name, own in self.terms.items():
            yield "configuration", f"{name}: {json.dumps(vars(own))}"
        for name, value in self.validation.items():
            yield "validation", f"{name}: {value:.4f}"


def _together(cells: Sequence[Cell], seed: int, settings: SiteSettings) -> dict[str, Scores]:
    alone = [cell for cell in cells if cell.row.title == ALONE and cell.seed == seed]
    folds = [found for cell in alone if (found := ensemble_scores(cell, settings))]
    return {site: joined([one[site] for one in folds]) for site in folds[0]} if len(folds) == len(alone) else {}


def _parted(line: str) -> tuple[str, str]:
    name, _, said = line.partition(": ")
    return name, said


def _validation(cells: Sequence[Cell], row: Row) -> float | None:
    own = [cell for cell in cells if cell.row == row and cell.plan.model_selection.keep != "last"]
    found = []
    for summary in (cell.summary() for cell in own):
        if summary:
            chosen = summary.selected.rounds
            found += [one.validation[chosen[site]] for site, one in summary.sites.items()]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None
