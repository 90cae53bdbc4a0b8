"""Central training: all hospitals' data in one place, the upper bound that federated methods are held against."""

from typing import ClassVar, Literal

from medsilo.schedule.algorithm import BY_ITSELF, Algorithm


class Central(Algorithm):
    """One model trained on the pooled training data and tested at every site. In process only."""

    title = "Central"
    paper = "upper bound"
    protocols = {"paper": BY_ITSELF}
    pooled = True
    personal: ClassVar[bool] = True  # the pool is the only site

    name: Literal["central"] = "central"
