"""Local training, the papers' "Base": every hospital for itself."""

from typing import Literal

from medsilo.course.algorithm import BY_ITSELF, Algorithm
from medsilo.course.outcome import Outcome, OwnModels


class Local(Algorithm):
    """θ_i ← θ_i: nothing travels but metrics."""

    title = "Local"
    paper = "the papers' Base"
    protocols = {"paper": BY_ITSELF}

    name: Literal["local"] = "local"

    @property
    def outcome(self) -> Outcome:
        return OwnModels()
