"""Local training, the papers' "Base": every hospital for itself."""

from typing import Literal

from medsilo.methods.base import Algorithm, Groups, Modules


class Local(Algorithm):
    """θ_i ← θ_i: nothing travels but metrics."""

    title = "Local"
    paper = "the papers' Base"
    travels = "nothing"

    name: Literal["local"] = "local"

    def shared(self, modules: Modules, phase: str) -> Groups:
        return {}
