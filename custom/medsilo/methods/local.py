"""Single-site training, which the papers of other methods call "Base"."""

from typing import ClassVar, Literal

from medsilo.schedule.algorithm import BY_ITSELF, Algorithm


class Local(Algorithm):
    """Each hospital trains its model alone, and sends only metrics."""

    title = "Local"
    paper = "the papers' Base"
    sends = "nothing"
    stays = "the hospital's own model"
    bytes_sent = "0"
    suits = "the baseline that federated training has to beat"
    protocols = {"paper": BY_ITSELF}
    personal: ClassVar[bool] = True

    name: Literal["local"] = "local"
