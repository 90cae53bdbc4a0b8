"""The exact results of a site's work: they go to disclosure.py, which decides what of them leaves, and nowhere else."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medsilo.core.files import write_text
from medsilo.core.tensors import Groups
from medsilo.runs.paths import CASES
from medsilo.tasks.metrics import Measures


@dataclass(frozen=True)
class ExactScores:
    """A model's exact scores over a part's cases, and its score with noise where that is what leaves."""

    loss: float
    score: float
    measures: Measures
    noisy: float | None = None


@dataclass(frozen=True)
class ExactResult:
    """The result of a piece of work: of "join" there is nothing but this."""

    groups: Groups = field(default_factory=dict, kw_only=True)  # as they travel


@dataclass(frozen=True)
class ExactMessage(ExactResult):
    """A letter of secure aggregation, which holds keys and masks and no number of a patient."""

    secagg: dict[str, Any]


@dataclass(frozen=True)
class ExactRound(ExactResult):
    """A round of training; validated: the model as it arrived, None where the plan does not look at it."""

    loss: float
    samples: int
    validated: ExactScores | None


@dataclass(frozen=True)
class ExactDelivery(ExactResult):
    """The outcome, as it was taken over. outcome: what a method's outcome tells, within the site's resolution."""

    validated: ExactScores | None
    outcome: dict[str, Any] | None


@dataclass(frozen=True)
class ExactTest(ExactResult):
    """A test of the model of a round. decisive: validation cases that a threshold follows from, where one is told."""

    selected: int
    scores: ExactScores
    decisive: Measures | None
    outcome: dict[str, Any] | None


CASE, PATIENT = "case", "patient"


def write_measures(folder: Path, measures: Measures, patients: Sequence[str]) -> None:
    """One line per test case, with numbers for names: the case's, and its patient's in order of appearance."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([CASE, PATIENT, *measures])
    columns = [values.tolist() for values in measures.values()]
    for case, (patient, *row) in enumerate(zip(patients, *columns, strict=True)):
        writer.writerow([case, numbers[patient], *("" if value != value else value for value in row)])
    write_text(folder / CASES, text.getvalue())
