"""Centralised training on the pooled data of all hospitals, an upper bound for comparison."""

from typing import ClassVar, Literal

from medsilo.schedule.algorithm import BY_ITSELF, Algorithm


class Central(Algorithm):
    """Centralised training: one model is trained on the pooled training data, and every site tests the model."""

    title = "Central"
    paper = "upper bound"
    sends = "all data are pooled"
    stays = "nothing"
    bytes_sent = "–"
    extra_work = "–"
    suits = "an upper bound for comparison; runs in one process only"
    protocols = {"paper": BY_ITSELF}
    pooled = True
    # the model counts as personal, because the pooled data count as the data of a single site
    personal: ClassVar[bool] = True

    name: Literal["central"] = "central"
