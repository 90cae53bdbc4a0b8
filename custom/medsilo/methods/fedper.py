"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019."""

from collections.abc import Sequence
from typing import Literal

from medsilo.core.tensors import Modules, Tensors
from medsilo.course.algorithm import require, require_features, without
from medsilo.course.declared import Private
from medsilo.course.group import Group
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Phase
from medsilo.learning.layers import head_names
from medsilo.learning.training import Training
from medsilo.methods.fedavg import Averaging


class FedPer(Averaging):
    """FedAvg of the body; the head, the network's last layer, stays at the site."""

    title = "FedPer"
    paper = "Arivazhagan et al. 2019"

    name: Literal["fedper"] = "fedper"

    @property
    def outcome(self) -> Outcome:
        return OwnModels()

    def phases(self, training: Training) -> Sequence[Phase]:
        return [
            Phase("train", training.rounds, (Group("body", body, self.mean, title="model without the last layer"),))
        ]

    def private(self) -> Private:
        says = "the head learns by noisy steps, too, although it stays: the body's gradients depend on it"
        return Private(("model",), says=says)

    def check(self, modules: Modules) -> None:
        heads = head_names(modules["model"])
        require(heads, self.name, "the head", "choose a network with a linear or convolution layer")
        require_features(modules["model"], self.name)


def body(modules: Modules) -> Tensors:
    """Return the model's tensors without those of the head."""
    model = modules["model"]
    return without(model.state_dict(), head_names(model))
