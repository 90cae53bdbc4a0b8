"""FedBN: Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, 2021."""

from typing import Literal

from medsilo.learning.layers import batch_norm_names
from medsilo.methods.base import Groups, Modules, require, without
from medsilo.methods.fedavg import Averaging


class FedBN(Averaging):
    """FedAvg of everything but batch norm, whose weights and statistics stay at the site."""

    title = "FedBN"
    paper = "Li et al. 2021"
    travels = "model without batch norm"

    name: Literal["fedbn"] = "fedbn"

    def shared(self, modules: Modules, phase: str) -> Groups:
        model = modules["model"]
        return {"model": without(model.state_dict(), batch_norm_names(model))}

    def check(self, modules: Modules) -> None:
        require(batch_norm_names(modules["model"]), self.name, "batch norm", "set network.norm=batch or choose fedavg")
