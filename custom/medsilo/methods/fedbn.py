"""FedBN: Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, 2021."""

from typing import ClassVar, Literal

from medsilo.core.tensors import Modules
from medsilo.learning.layers import local_norm_names
from medsilo.methods.bases import require
from medsilo.methods.fedavg import Averaging
from medsilo.schedule.declared import Private
from medsilo.schedule.phase import Group, network


class FedBN(Averaging):
    """FedAvg of all layers except batch norm, whose weights and statistics stay at the site.

    In a network without batch norm, normalisation layers of other kinds stay at the site.
    """

    title = "FedBN"
    paper = "Li et al. 2021"
    sends = "model without norms"
    stays = "batch norm: weights and statistics"
    bytes_sent = "0.98"
    suits = "hospitals with different scanners, stains or intensities"
    personal: ClassVar[bool] = True

    name: Literal["fedbn"] = "fedbn"

    def groups(self) -> tuple[Group, ...]:
        return (Group("model", network("model", but=local_norm_names), self.mean, title="model without norms"),)

    def check(self, modules: Modules) -> None:
        require(
            local_norm_names(modules["model"]),
            self.name,
            "norms",
            "give it batch norm (network.norm=batch) or choose fedavg",
        )

    def private(self) -> Private:
        says = "the norms also learn with noise, although they stay, because all other gradients depend on them"
        return Private(("model",), disclosure_notes=says)
