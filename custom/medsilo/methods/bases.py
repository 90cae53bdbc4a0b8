"""Define base classes of several methods, and helper functions for their networks."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.layers import head_names
from medsilo.learning.loop import TrainStep
from medsilo.methods.fedavg import Averaging
from medsilo.mixing.aggregators import Aggregator
from medsilo.mixing.staleness import Shares, StalenessWeightedMean, at_most
from medsilo.schedule.algorithm import BY_ITSELF, Algorithm
from medsilo.schedule.outcome import Outcome, OwnModels
from medsilo.schedule.phase import Group, ModelFactory, ServerSide, network, without
from medsilo.schedule.train_context import TrainContext


class SharedAndOwn(Averaging):
    """The base of methods in which each site trains a shared network "global" and a personal network "model".

    At the beginning, the shared and the personal network have the same weights. The server averages the network
    "global", and the lead receives the average. The personal network never leaves the site.
    """

    outcome: ClassVar[Outcome] = OwnModels(common="global")

    def networks(self, build: ModelFactory) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model)}

    def groups(self) -> tuple[Group, ...]:
        return (Group("global", network("global"), self.mean, title="shared model"),)

    @abstractmethod
    def learning(self, context: TrainContext) -> AbstractContextManager[Sequence[TrainStep]]:
        """Yield the training steps of a site's networks for one round."""

    def train_round(self, context: TrainContext) -> float:
        with self.learning(context) as train_steps:
            return context.train(*train_steps)


class MeanOfOwn(Averaging):
    """A base class of methods: each site k keeps a personal network "model" with weights w_k.

    The network "global" receives the mean w̄ ← Σ p_k w_k from the server, and sends w_k to the server.
    """

    outcome: ClassVar[Outcome] = OwnModels(common="global")

    def networks(self, build: ModelFactory) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model).requires_grad_(False)}

    def groups(self) -> tuple[Group, ...]:
        return (Group("global", network("global"), self.mean, title="own model", arrived=self.arrived),)

    def arrived(self, modules: Modules, came: bool) -> None:
        """Called when a site has received the server's tensors; subclasses may override this method.

        Args:
            modules: the site's networks by name
            came: False if the server sent no mean
        """

    @abstractmethod
    def learn(self, context: TrainContext) -> float:
        """Train "model" for one round, while "global" contains the mean w̄."""

    def train_round(self, context: TrainContext) -> float:
        loss = self.learn(context)
        copy_into(context.modules["global"], context.modules["model"])
        return loss


class ServerStep(Averaging):
    """The base of methods in which the server makes an optimizer step; tensors such as running statistics are
    averaged.
    """

    undefended: ClassVar[str] = ""  # error message that explains why robust aggregation is impossible

    def groups(self) -> tuple[Group, ...]:
        return (
            Group("model", trained_weights, self.step, undefended=self.undefended),
            Group("buffers", other_tensors, self.mean, title="running statistics"),
        )

    @abstractmethod
    def step(self, server: ServerSide) -> Aggregator:
        """Return the aggregator of the trained weights."""


def copy_into(module: nn.Module, shared: nn.Module) -> None:
    """Copy all weights and running statistics from the shared to the personal network.

    Args:
        module: the personal network, which is changed in place
        shared: the shared network
    """
    module.load_state_dict(shared.state_dict())


def trained_weights(modules: Modules) -> Tensors:
    model = modules["model"]
    everything = model.state_dict()
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: everything[name] for name in names if name in everything}


def other_tensors(modules: Modules) -> Tensors:
    return without(modules["model"].state_dict(), list(trained_weights(modules)))


def learning_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Numbers(nn.Module):
    """A module whose buffers are scalars: numbers in double precision, and truth values."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        for name, value in values.items():
            kind = torch.bool if isinstance(value, bool) else torch.float64
            self.register_buffer(name, torch.tensor(value, dtype=kind))


def zeros_like(model: nn.Module) -> nn.ParameterList:
    """Return zero tensors in the shapes of the trained weights, to which sums can be added."""
    return nn.ParameterList(nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in learning_weights(model))


class WeighingMethod(Algorithm):
    """The base of methods in which the server computes the sites' weights a_k for the mean θ ← Σ_k a_k θ_k.

    The server computes the sites' weights a_k after all sites have answered, and also averages running statistics with
    these weights.
    """

    protocols = {"paper": {**BY_ITSELF, "algorithm.largest_share": 1.0}}

    largest_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="the largest weight of one hospital in the mean; any excess is distributed to the other hospitals. "
        "The paper does not limit a hospital's weight, which corresponds to 1",
    )

    def groups(self) -> tuple[Group, ...]:
        model = Group(
            "model",
            trained_weights,
            lambda server: StalenessWeightedMean(lambda mean: at_most(self.weigh(server, mean), self.largest_share)),
            undefended=f"mixing: {self.name} computes the weight of each hospital, so a robust rule or a cap cannot "
            "replace its mean; lower algorithm.largest_share, or use fedavg",
        )
        buffers = Group(
            "buffers",
            other_tensors,
            lambda server: StalenessWeightedMean(lambda mean: server.aggregators["model"].shares),
            title="running statistics",
            undefended=model.undefended,
        )
        return model, buffers

    @abstractmethod
    def weigh(self, server: ServerSide, mean: StalenessWeightedMean) -> Shares:
        """Return the weight of each answering site in the mean over sites.

        Args:
            server: the server's side of the method
            mean: the aggregator, which has the answers of the round
        """

    def warnings(self, sites: Sequence[str]) -> list[str]:
        if self.largest_share * len(sites) > 1:
            return []
        return [f"algorithm.largest_share {self.largest_share:g} gives {len(sites)} hospitals equal weights"]


def require(names: Sequence[str], method: str, layer: str, remedy: str) -> None:
    """Raise a PlanError if a method keeps a kind of layer at the sites, but this network has no such layer.

    Args:
        names: names of the layers' tensors in the network
        method: the method's name
        layer: words that describe the layer
        remedy: advice at the end of the error message
    """
    if not names:
        raise PlanError(f"algorithm.name: {method} keeps {layer} at the sites, but this network has none; {remedy}")


def require_features(model: nn.Module, method: str) -> None:
    """Raise a PlanError if a network has no layer before its head."""
    heads = head_names(model)
    if not heads or not without(model.state_dict(), heads):
        raise PlanError(
            f"algorithm.name: {method} needs features, and this network has no layer before its last; choose a deeper "
            "one, such as network.name=mlp for a table"
        )
