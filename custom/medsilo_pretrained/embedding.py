"""Train a head on the embeddings of a frozen network. The embedding of each case is computed only once."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from medsilo.extend import MedsiloError, Network
from medsilo.extend.methods import head_layers
from medsilo.extend.networks import NETWORKS
from medsilo_pretrained.tuned import Begun

FEATURES = 1
BESIDE = {"hidden": (64,), "norm": "group"}


class Behind(nn.Module):
    """A network that consists of a frozen body and a trainable head; the network's input is a batch of cases, or a
    batch of embeddings.
    """

    def __init__(self, body: nn.Module, head: nn.Module, network: Network) -> None:
        """Combine a body and a head; `network` configures further networks that a method builds for the same cases."""
        super().__init__()
        self.body, self.head, self.beside = body.eval(), head, network

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.body.eval()  # dropout and batch norm of the frozen body always stay in evaluation mode
        return self

    def state_dict(self, *args: Any, prefix: str = "", **how: Any) -> Any:
        """Return only the state of the head. The body adds nothing to the state, but searching the body for tensors
        would take most of the time of a round.
        """
        return self.head.state_dict(*args, prefix=f"{prefix}head.", **how)

    def embed(self, inputs: Tensor) -> Tensor:
        """Compute the embeddings of a batch one case at a time, so that the other cases in the batch cannot change an
        embedding.
        """
        with torch.no_grad():
            return torch.cat([self.body(one) for one in inputs.split(1)]).float()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs if inputs.ndim == 1 + FEATURES else self.embed(inputs))


class FrozenNetwork(Begun):
    """A frozen network without its last layer, followed by a trainable head of linear layers.

    A hospital computes the embedding of each image only once, and stores it. Embeddings never leave the hospital; only
    the head is sent.
    """

    name: Literal["frozen"] = "frozen"
    hidden: tuple[int, ...] = Field(
        (),
        max_length=8,
        description="number of features of each hidden layer of the head; without hidden layers, the head is one "
        "linear layer",
    )
    norm: Literal["batch", "group", "none"] = Field(
        "batch", description="normalisation layer after each hidden layer of the head"
    )
    once: bool = Field(
        True,
        description="whether the embedding of each image is computed once and kept at the hospital. With `false`, the "
        "embedding is computed in every epoch, so that images may be augmented",
    )

    @model_validator(mode="after")
    def _has_a_head(self) -> Self:
        if any(not 1 <= own <= 4096 for own in self.hidden):
            raise ValueError("hidden: give numbers from 1 to 4096")
        return self

    @property
    def embedding(self) -> str:
        if not self.once:
            return ""
        begins = self.start.sha256 if self.start else ""
        return f"{begins} {self.of.model_dump_json()}"

    def embed(self, module: Any, inputs: Tensor) -> Tensor:
        return module.embed(inputs)

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        """Yield the reasons why an embedding can't be computed only once under this plan, for example because the plan
        changes the images.
        """
        task = plan.task
        if not self.start:
            yield "network.from: a frozen network needs the file with its weights; name one beside the plan"
            return
        if task.goal.structures or task.draws or task.piece:
            yield (
                f"network.name: {self.name} has one embedding for each whole case, and task {task.name} needs another "
                "network, such as tuned"
            )
            return
        if self.once and task.variation:
            yield (
                "task.augmentation: an embedding is computed once, of an image as it is; set it to [], or network.once "
                "to false"
            )
        if self.once and plan.algorithm.input_layer(networks) is not None:
            yield (
                f"network.once: {plan.algorithm.name} changes images before the network reads them, so no embedding is "
                "theirs for good; set it to false, or choose another method"
            )
        yield from super().conflicts(plan, networks)

    def build(self, channels: int, classes: int) -> nn.Module:
        body = self.of.build(channels, classes)
        found = self.begin(body, channels, classes)
        features = _without_head(body)
        if found:
            found = {name: own for name, own in found.items() if name in body.state_dict()}
        self.freeze(body, found, ())
        head = NETWORKS["mlp"](hidden=self.hidden, norm=self.norm) if self.hidden else NETWORKS["linear"]()
        return Behind(body, head.build(features, classes), self.model_copy(update=BESIDE))


def _without_head(network: nn.Module) -> int:
    """Replace the last layer of a network by the identity, and return the number of input features of the replaced
    layer.
    """
    layers = head_layers(network)
    if not layers or not isinstance(layers[0], nn.Linear):
        raise MedsiloError("network.of: the network has no embeddings, because its last layer is not linear; use tuned")
    name = next(name for name, layer in network.named_modules() if layer is layers[0])
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())
    return layers[0].in_features
