"""Read the test scores of single cases from a run folder."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from medsilo.core.errors import MedsiloError
from medsilo.federation.raw_results import CASE, PATIENT
from medsilo.runs.paths import CASES, site_folder
from medsilo.tasks.metrics import Measures
from medsilo.tasks.scored_together import ACCURACY, AUROC, BALANCED
from medsilo_lab.study.evidence import (
    Interval,
    Scores,
    interval,
    interval_of_concordance,
    mean_of_intervals,
    parts_of_concordance,
)

CONCORDANCE = "concordance"  # name of a score that is a mean over pairs of cases, and not over cases
RANKED = ("time", "event", "risk")
CLOSENESS = "closeness"


@dataclass(frozen=True)
class SiteTest:
    metric: str
    scores: Scores
    measures: Measures

    @classmethod
    def read(cls, run: Path, site: str, metric: str) -> Self:
        try:
            measures, numbers = read_measures(site_folder(run, site))
            values = measures[metric].numpy()
            if metric == CONCORDANCE:
                values = parts_of_concordance(*(measures[name].numpy() for name in RANKED))
            return cls(metric, Scores(values, np.unique(numbers, return_inverse=True)[1]), measures)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise MedsiloError(
                f"{CASES} of {site} in run '{run.resolve().name}' is missing or damaged: repeat the run", str(error)
            ) from error

    @property
    def interval(self) -> Interval | None:
        return interval_over(self.metric, self.scores, lambda: self.measures)

    @property
    def mean(self) -> float | None:
        """In a regression, the score of a constant prediction: for every case, the mean of all test cases. Return None
        for all other tasks.

        In a regression, a score is 1 minus a multiple of the absolute error.
        """
        if self.metric != CLOSENESS:
            return None
        values, error = self.measures["value"], float(self.measures["mae"].mean())
        scale = float(1 - self.measures[self.metric].mean()) / error if error else 0.0
        return 1 - scale * float((values - values.mean()).abs().mean())

    @property
    def ranks(self) -> dict[str, float]:
        ordered = np.sort(self.scores.values)
        places = {"worst": 0, "median": len(ordered) // 2, "best": len(ordered) - 1}
        return {which: float(ordered[place]) for which, place in places.items()}


def interval_over(metric: str, scores: Scores, measures: Callable[[], Measures]) -> Interval | None:
    """Return the confidence interval of a site's score over other patients. The function `measures` returns all
    measures of each test case.
    """
    if metric == CONCORDANCE:
        return interval_of_concordance(*(measures()[name].numpy() for name in RANKED))
    return _of_classes(metric, scores, measures()) if metric in (AUROC, BALANCED) else interval(scores)


def _of_classes(metric: str, scores: Scores, measures: Measures) -> Interval | None:
    """Return the confidence interval of an AUROC or of a balanced accuracy. Each is a mean over classes, so the
    interval is computed from the intervals of the classes.
    """
    if scores.people < 2:
        return None
    labels, found = measures["label"].numpy(), []
    classes = np.unique(labels).astype(int).tolist()
    if len(classes) < 2:
        return None
    for label in classes if metric == BALANCED else classes[1:] if "p2" not in measures else classes:
        own = labels == label
        if metric == AUROC:
            risk = measures[f"p{label}"].numpy()
            each = interval_of_concordance(np.where(own, 1.0, 2.0), own.astype(float), risk)
            mean = float(parts_of_concordance(np.where(own, 1.0, 2.0), own.astype(float), risk).mean())
        else:
            right = Scores(measures[ACCURACY].numpy()[own], np.unique(scores.patients[own], return_inverse=True)[1])
            each, mean = interval(right), float(right.values.mean())
        found.append((mean, each or (0.0, 1.0)))
    return mean_of_intervals(found, independent=metric == BALANCED)


def read_measures(folder: Path) -> tuple[Measures, list[int]]:
    """Read the file that `write_measures` wrote. Return the measures of all cases, and the patient of each case as a
    number.
    """
    with (folder / CASES).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in (CASE, PATIENT)]
    measures = {name: torch.tensor([float(row[name] or "nan") for row in rows], dtype=torch.float64) for name in names}
    return measures, [int(row[PATIENT]) for row in rows]
