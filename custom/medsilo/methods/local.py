"""Local training, the papers' "Base": every hospital for itself."""

from typing import ClassVar, Literal

from medsilo.schedule.algorithm import BY_ITSELF, Algorithm


class Local(Algorithm):
    """θ_i ← θ_i: only metrics travel."""

    title = "Local"
    paper = "the papers' Base"
    protocols = {"paper": BY_ITSELF}
    personal: ClassVar[bool] = True

    name: Literal["local"] = "local"
