"""Local training, the papers' "Base": every hospital for itself."""

from typing import ClassVar, Literal

from medsilo.schedule.algorithm import BY_ITSELF, Algorithm


class Local(Algorithm):
    """θ_i ← θ_i: nothing travels but metrics."""

    title = "Local"
    paper = "the papers' Base"
    protocols = {"paper": BY_ITSELF}
    personal: ClassVar[bool] = True

    name: Literal["local"] = "local"
