"""Centralised training on the pooled data of all hospitals, an upper bound for comparison."""

from typing import ClassVar, Literal

from medsilo.schedule.algorithm import BY_ITSELF, Algorithm


class Central(Algorithm):
    """One model is trained on the pooled training data and tested at every site, in one process only."""

    title = "Central"
    paper = "upper bound"
    protocols = {"paper": BY_ITSELF}
    pooled = True
    personal: ClassVar[bool] = True  # the pool is the only site

    name: Literal["central"] = "central"
