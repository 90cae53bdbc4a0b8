"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019."""

from typing import ClassVar, Literal

from torch import nn

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules
from medsilo.learning.layers import head_layers, head_names
from medsilo.methods.bases import require, require_features
from medsilo.methods.fedavg import Averaging
from medsilo.schedule.declared import Private
from medsilo.schedule.phase import Group, network


class FedPer(Averaging):
    """FedAvg of all layers except the last layer, the head, which stays at the site."""

    title = "FedPer"
    paper = "Arivazhagan et al. 2019"
    sends = "model without the last layer"
    stays = "the head, and the state of the head's optimizer"
    bytes_sent = "0.99"
    suits = "hospitals with different class frequencies"
    personal: ClassVar[bool] = True

    name: Literal["fedper"] = "fedper"

    def groups(self) -> tuple[Group, ...]:
        return (Group("body", network("model", but=head_names), self.mean, title="model without the last layer"),)

    def private(self) -> Private:
        says = "the head also learns with noise, although it stays, because the body's gradients depend on the head"
        return Private(("model",), disclosure_notes=says)

    def check(self, modules: Modules) -> None:
        has_body_and_head(modules["model"], self.name)


def has_body_and_head(model: nn.Module, method: str) -> None:
    """Raise a PlanError if a network cannot be divided into a body and a head.

    Args:
        model: the network
        method: the method's name in errors
    """
    require(head_names(model), method, "the head", "choose a network with a linear or convolution layer")
    require_features(model, method)
    (head,) = head_layers(model)
    body = [layer for layer in model.modules() if layer not in {*head.modules()}]
    if {*head.parameters()} & {own for layer in body for own in layer.parameters(recurse=False)}:
        raise PlanError(
            f"algorithm.name: {method} separates head and body, but these share a weight in this network; choose fedavg"
        )
