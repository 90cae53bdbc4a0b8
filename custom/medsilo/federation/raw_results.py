"""Define the exact results of a site's work, from which disclosure.py makes answers."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medsilo.core.files import write_text
from medsilo.core.tensors import Groups
from medsilo.runs.paths import CASES, SUBGROUPS
from medsilo.tasks.metrics import Measures


@dataclass(frozen=True)
class ExactScores:
    """A model's exact scores over the validation or test cases, and a noisy score if the site must not send the exact
    score.
    """

    loss: float
    score: float
    measures: Measures
    noisy: float | None = None


@dataclass(frozen=True)
class ExactResult:
    """A site's exact result for a request, before rounding and noise."""

    groups: Groups = field(default_factory=dict, kw_only=True)  # the encoded tensors that the site sends to the server


@dataclass(frozen=True)
class ExactMessage(ExactResult):
    """A message of secure aggregation, which contains keys and masks, but no numbers about patients."""

    secagg: dict[str, Any]


@dataclass(frozen=True)
class ExactRound(ExactResult):
    """The exact result of a training round.

    Args:
        trained: means over the cases of the round's training batches, by the names of their fields in the answer
        validated: scores of the received model; None if the plan does not validate the received model
    """

    trained: Mapping[str, float]
    samples: int
    validated: ExactScores | None


@dataclass(frozen=True)
class ExactDelivery(ExactResult):
    """The exact scores of the final model.

    Args:
        outcome: the method's facts about the outcome, rounded in the same way as the site's scores
    """

    validated: ExactScores | None
    outcome: dict[str, Any] | None


@dataclass(frozen=True)
class ExactTest(ExactResult):
    """The exact result of a test of the final model.

    Args:
        decisive: validation measures for a threshold; None if no threshold may be sent
    """

    selected: int
    scores: ExactScores
    decisive: Measures | None
    outcome: dict[str, Any] | None


CASE, PATIENT = "case", "patient"
SUBGROUP, LEVEL = "subgroup", "level"


def write_measures(folder: Path, measures: Measures, patients: Sequence[str]) -> None:
    """Write each test case's measures to a CSV file, in which numbers replace the names of cases and patients."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([CASE, PATIENT, *measures])
    columns = [values.tolist() for values in measures.values()]
    for case, (patient, *row) in enumerate(zip(patients, *columns, strict=True)):
        writer.writerow([case, numbers[patient], *("" if value != value else value for value in row)])
    write_text(folder / CASES, text.getvalue())


def write_levels(folder: Path, levels: Mapping[tuple[str, str], Collection[str]], patients: Sequence[str]) -> None:
    """Write the patients of each subgroup level to a CSV file, in which patients have the same numbers as in the file
    of test cases. If a level's score is suppressed, the file has one line for the level, which names no patient.
    """
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([SUBGROUP, LEVEL, PATIENT])
    for (name, word), level in levels.items():
        told: list[int | str] = [*sorted(numbers[patient] for patient in level)]
        writer.writerows((name, word, number) for number in told or [""])
    write_text(folder / SUBGROUPS, text.getvalue())
