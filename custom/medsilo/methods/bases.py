"""Bases of several methods: a mean beside own models, a server's step, weights from updates; networks they need."""

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
from medsilo.mixing.late import Shares, StalenessWeightedMean, at_most
from medsilo.mixing.mixers import Aggregator
from medsilo.schedule.algorithm import BY_ITSELF, Algorithm
from medsilo.schedule.outcome import Outcome, OwnModels
from medsilo.schedule.phase import Group, ModelFactory, ServerSide, network, without
from medsilo.schedule.train_context import TrainContext


class SharedAndOwn(Averaging):
    """ "global" is the network w that travels and that the lead gets; "model" is the site's own, which it ends with.

    Both begin with the same weights. The site's own never leaves it, running statistics of batch norm included.
    """

    outcome: ClassVar[Outcome] = OwnModels(common="global")

    def networks(self, build: ModelFactory) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model)}

    def groups(self) -> tuple[Group, ...]:
        return (Group("global", network("global"), self.mean, title="shared model"),)

    @abstractmethod
    def learning(self, bench: TrainContext) -> AbstractContextManager[Sequence[TrainStep]]:
        """Yield the training steps of the site's networks for a round, while the block lasts."""

    def train_round(self, bench: TrainContext) -> float:
        """Train both networks in one pass over the data."""
        with self.learning(bench) as lessons:
            return bench.train(*lessons)


class MeanOfOwn(Averaging):
    """ "model" is w_k, which a site keeps from round to round.

    "global" receives the mean w̄ ← Σ p_k w_k, and sends w_k.
    """

    outcome: ClassVar[Outcome] = OwnModels(common="global")

    def networks(self, build: ModelFactory) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model).requires_grad_(False)}

    def groups(self) -> tuple[Group, ...]:
        return (Group("global", network("global"), self.mean, title="own model", arrived=self.arrived),)

    def arrived(self, modules: Modules, came: bool) -> None:
        """Note at a site that w̄ has arrived, where a method has to know."""

    @abstractmethod
    def learn(self, bench: TrainContext) -> float:
        """Train "model"; "global" holds w̄."""

    def train_round(self, bench: TrainContext) -> float:
        """Train, and copy the result to the network that leaves."""
        loss = self.learn(bench)
        copy_into(bench.modules["global"], bench.modules["model"])
        return loss


class ServerStep(Averaging):
    """The server steps with the trained weights; all other tensors, such as running statistics, are averaged."""

    undefended: ClassVar[str] = ""  # why no robust aggregation can replace the step, and the alternative

    def groups(self) -> tuple[Group, ...]:
        return (
            Group("model", trained_weights, self.step, undefended=self.undefended),
            Group("buffers", other_tensors, self.mean, title="running statistics"),
        )

    @abstractmethod
    def step(self, server: ServerSide) -> Aggregator:
        """Return the update that the server makes to the trained weights."""


def copy_into(own: nn.Module, shared: nn.Module) -> None:
    """own ← w, running statistics included."""
    own.load_state_dict(shared.state_dict())


def trained_weights(modules: Modules) -> Tensors:
    """Return the model's parameters."""
    model = modules["model"]
    everything = model.state_dict()
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: everything[name] for name in names if name in everything}


def other_tensors(modules: Modules) -> Tensors:
    """Return the model's buffers."""
    return without(modules["model"].state_dict(), list(trained_weights(modules)))


def learning_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that learn."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Numbers(nn.Module):
    """A place for numbers of a site that it keeps or sends, in double precision, and for truth values."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        for name, value in values.items():
            kind = torch.bool if isinstance(value, bool) else torch.float64
            self.register_buffer(name, torch.tensor(value, dtype=kind))


def zeros_like(model: nn.Module) -> nn.ParameterList:
    """Zeros in the shapes of the trained weights, for sums that a site or the server collects."""
    return nn.ParameterList(nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in learning_weights(model))


class WeighingMethod(Algorithm):
    """θ ← Σ_k a_k θ_k, also of running statistics, with weights that the server works out once all have answered."""

    protocols = {"paper": {**BY_ITSELF, "algorithm.largest_share": 1.0}}

    largest_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="the largest share of one hospital, whatever it sends or states; the excess goes to the others. "
        "The paper has no bound, which is 1",
    )

    def groups(self) -> tuple[Group, ...]:
        """The trained weights, and the buffers averaged with the same weights."""
        model = Group(
            "model",
            trained_weights,
            lambda server: StalenessWeightedMean(lambda mean: at_most(self.weigh(server, mean), self.largest_share)),
            undefended=f"mixing: how much a hospital counts is what {self.name} finds out, so a robust rule or a cap "
            "can't take its mean's place; lower algorithm.largest_share, or use fedavg",
        )
        buffers = Group(
            "buffers",
            other_tensors,
            lambda server: StalenessWeightedMean(lambda mean: server.mixers["model"].shares),
            title="running statistics",
            undefended=model.undefended,
        )
        return model, buffers

    @abstractmethod
    def weigh(self, server: ServerSide, mean: StalenessWeightedMean) -> Shares:
        """Return the weights of the sites that answered."""

    def warnings(self, sites: Sequence[str]) -> list[str]:
        if self.largest_share * len(sites) > 1:
            return []
        return [
            f"algorithm.largest_share {self.largest_share:g} leaves {len(sites)} hospitals no choice: all count alike"
        ]


def require(names: Sequence[str], method: str, layer: str, remedy: str) -> None:
    """Raise a PlanError if a method that keeps a kind of layer at the sites finds no such layer in this network."""
    if not names:
        raise PlanError(f"algorithm.name: {method} keeps {layer} at the sites, but this network has none; {remedy}")


def require_features(model: nn.Module, method: str) -> None:
    """Raise a PlanError if a method needs layers before the head, and this network has only a head."""
    heads = head_names(model)
    if not heads or not without(model.state_dict(), heads):
        raise PlanError(
            f"algorithm.name: {method} needs features, and this network has no layer before its last; choose a deeper "
            "one, such as network.name=mlp for a table"
        )
