"""Local training, the papers' "Base": every hospital for itself."""

from collections.abc import Sequence
from typing import Literal

from medsilo.course.algorithm import Algorithm
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Phase
from medsilo.learning.training import Training


class Local(Algorithm):
    """θ_i ← θ_i: nothing travels but metrics."""

    title = "Local"
    paper = "the papers' Base"

    name: Literal["local"] = "local"

    @property
    def outcome(self) -> Outcome:
        return OwnModels()

    def phases(self, training: Training) -> Sequence[Phase]:
        return [Phase("train", training.rounds)]
