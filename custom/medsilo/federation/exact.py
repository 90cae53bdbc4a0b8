"""The exact results of a site's work: they go to disclosure.py, which decides what of them leaves, and nowhere else."""

from dataclasses import dataclass, field
from typing import Any

from medsilo.core.tensors import Groups
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
class ExactLetter(ExactResult):
    """A letter of secure aggregation, which holds keys and masks and no number of a patient."""

    sealing: dict[str, Any]


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
class ExactLooks(ExactResult):
    """Findings of layers in the validation cases."""

    looked: dict[str, Any]


@dataclass(frozen=True)
class ExactTest(ExactResult):
    """A test of the model of a round. decisive: validation cases that a threshold follows from, where one is told."""

    selected: int
    scores: ExactScores
    decisive: Measures | None
    outcome: dict[str, Any] | None
    looked: dict[str, Any] = field(default_factory=dict)
