"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019."""

from typing import Literal

from medsilo.learning.layers import head_names
from medsilo.methods.base import Groups, Modules, require, without
from medsilo.methods.fedavg import Averaging


class FedPer(Averaging):
    """FedAvg of the body; the head, the network's last layer, stays at the site."""

    title = "FedPer"
    paper = "Arivazhagan et al. 2019"
    travels = "body"

    name: Literal["fedper"] = "fedper"

    def shared(self, modules: Modules, phase: str) -> Groups:
        model = modules["model"]
        return {"body": without(model.state_dict(), head_names(model))}

    def check(self, modules: Modules) -> None:
        require(
            head_names(modules["model"]), self.name, "the head", "choose a network with a linear or convolution layer"
        )
