"""FedALA: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from medsilo.core.tensors import Modules
from medsilo.course.group import Group, network
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Phase
from medsilo.course.workbench import Blueprint, Workbench
from medsilo.learning.layers import keeping_statistics
from medsilo.learning.personal import copy_into
from medsilo.learning.training import Training
from medsilo.methods.fedavg import Averaging


class Aggregation(nn.Module):
    """W of a site, element by element, and whether it was learnt before."""

    learnt: Tensor

    def __init__(self, layers: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones_like(one), requires_grad=False) for one in layers)
        self.register_buffer("learnt", torch.tensor(False))


class FedALA(Averaging):
    """A site begins from θ + (w - θ) W, θ being its own model and w the shared one; W in [0, 1] is learnt there.

    W is for the last tensors alone; of all others w is taken as it is.
    """

    title = "FedALA"
    paper = "Zhang et al. 2023"

    name: Literal["fedala"] = "fedala"
    last: int = Field(2, ge=1, le=1000, description="how many of the network's last trained tensors have weights (p)")
    share: float = Field(0.8, gt=0, le=1, description="share of the training batches that W is learnt on (s)")
    step: float = Field(1.0, gt=0, le=1000, description="learning rate of W (η)")
    passes: int = Field(3, ge=1, le=1000, description="passes over them when W is learnt for the first time, later one")

    @property
    def outcome(self) -> Outcome:
        return OwnModels(common="global")

    def networks(self, build: Blueprint) -> Modules:
        model = build()
        shared = deepcopy(model).requires_grad_(False)
        return {"model": model, "global": shared, "aggregation": Aggregation(list(model.parameters())[-self.last :])}

    def phases(self, training: Training) -> Sequence[Phase]:
        shared = Group("global", network("global"), self.mean, title="own model")
        return [Phase("train", training.rounds, (shared,), self.work)]

    def personalise(self, bench: Workbench) -> None:
        """Make the site's model of what it has and what arrived, which is also what it trains from."""
        own, shared, aggregation = (bench.modules[name] for name in ("model", "global", "aggregation"))
        assert isinstance(aggregation, Aggregation)
        ours, theirs = (dict(list(net.named_parameters())[-self.last :]) for net in (own, shared))
        start = {name: tensor.detach().clone() for name, tensor in ours.items()}
        if all(map(torch.equal, own.parameters(), shared.parameters())):
            return  # nothing to learn
        weights = list(aggregation.weights)

        def mixed() -> dict[str, Tensor]:
            return {
                name: start[name] + (theirs[name] - start[name]) * w for name, w in zip(start, weights, strict=True)
            }

        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            layers = {name: tensor.requires_grad_() for name, tensor in mixed().items()}
            with keeping_statistics(shared), bench.compute.cast():
                loss = bench.loss(functional_call(shared, layers, (inputs,)), targets)
            for w, name, slope in zip(weights, layers, torch.autograd.grad(loss, list(layers.values())), strict=True):
                w.sub_(self.step * slope * (theirs[name] - start[name])).clamp_(0, 1)
            return loss.detach()

        shared.train()
        for number in range(1 if aggregation.learnt else self.passes):
            bench.epoch([learn], number, math.ceil(self.share * bench.steps))
        aggregation.learnt.fill_(True)
        copy_into(own, shared)
        own.load_state_dict(mixed(), strict=False)

    def work(self, bench: Workbench) -> float:
        loss = bench.train()
        copy_into(bench.modules["global"], bench.modules["model"])
        return loss
