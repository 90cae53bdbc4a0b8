"""Local training, the papers' "Base": every hospital for itself."""

from typing import ClassVar, Literal

from medsilo.course.algorithm import BY_ITSELF, Algorithm
from medsilo.course.outcome import Outcome, OwnModels


class Local(Algorithm):
    """θ_i ← θ_i: nothing travels but metrics."""

    title = "Local"
    paper = "the papers' Base"
    protocols = {"paper": BY_ITSELF}
    outcome: ClassVar[Outcome] = OwnModels()

    name: Literal["local"] = "local"
