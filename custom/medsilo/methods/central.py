"""Central training: all hospitals' data in one place, the upper bound that federated methods are held against."""

from typing import Literal

from medsilo.methods.base import Algorithm, Groups, Modules


class Central(Algorithm):
    """One model trained on the pooled training data and tested at every site. In process only."""

    title = "Central"
    paper = "upper bound"
    travels = "all data (in process only)"
    pooled = True

    name: Literal["central"] = "central"

    def shared(self, modules: Modules, phase: str) -> Groups:
        return {}
