"""FedALA (Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023)."""

import math
from collections.abc import Sequence
from statistics import pstdev
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.extend.methods import (
    MeanOfOwn,
    ModelFactory,
    Modules,
    TrainContext,
    TrainStep,
    called_with,
    copy_into,
    keeping_statistics,
    names_of_last_layers,
)

JUDGED = 10  # W has converged when the spread of this number of latest losses is small
# Index of the epoch that selects the sample of cases for learning W. The epochs of training are counted from 0, so the
# index -1 selects cases by an order that no epoch of training uses.
SAMPLE = -1


class Aggregation(nn.Module):
    """The state that a site keeps for FedALA. Besides the element-wise weights W, two flags store whether W was learned
    before, and whether the received mean must still be combined with the model.
    """

    learnt: Tensor
    waits: Tensor

    def __init__(self, weighed: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones_like(one), requires_grad=False) for one in weighed)
        self.register_buffer("learnt", torch.tensor(False))
        self.register_buffer("waits", torch.tensor(False))


class FedALA(MeanOfOwn):
    """A site starts each round from θ + (w̄ − θ) ⊙ W, where θ is the site's own model and w̄ is the mean of all models.
    The elements of W are in [0, 1], and W never leaves the site.

    W ← W − η ∇_W f(θ + (w̄ − θ) ⊙ W) is learned on a sample of the site's training cases, and only for the last p
    layers. In all layers except the last p layers, and for running statistics, the site takes the values of w̄.
    """

    title = "FedALA"
    paper = "Zhang et al. 2023"
    sends = "own model"
    stays = "the weights W"
    extra_work = "one pass to learn the mixing weights; up to 30 passes in the first round"
    suits = "hospitals that benefit to different degrees from the shared last layers"

    name: Literal["fedala"] = "fedala"
    layers: int = Field(
        1, ge=1, le=1000, description="p: how many of the network's last layers have learned mixing weights W"
    )
    share: float = Field(0.8, gt=0, le=1, description="s: the share of the training batches that are used to learn W")
    step: float = Field(1.0, gt=0, le=1000, description="η: learning rate of W")
    settled: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="when W is learned for the first time, learning ends once the standard deviation of the "
        "last ten losses is below this value. In later rounds, W is learned in one pass",
    )
    passes: int = Field(30, ge=1, le=1000, description="maximum number of passes when W is learned for the first time")

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        weighed = [modules["model"].get_parameter(name) for name in self._weighed(modules["model"])]
        return modules | {"aggregation": Aggregation(weighed)}

    def arrived(self, modules: Modules, came: bool) -> None:
        cast(Aggregation, modules["aggregation"]).waits.fill_(came)

    def personalise(self, context: TrainContext) -> None:
        """Combine the received mean with the site's model, but only once in a round, so that training starts from the
        model that was validated.
        """
        own, mean = context.modules["model"], context.modules["global"]
        aggregation = cast(Aggregation, context.modules["aggregation"])
        if not aggregation.waits:
            return
        aggregation.waits.fill_(False)
        if all(map(torch.equal, own.parameters(), mean.parameters())):
            return  # in the first round, the site's model equals the received mean, so W has no effect
        mixture = Mixture(own, mean, self._weighed(own), list(aggregation.weights))
        train_step, losses = mixture.train_step(context, self.step), list[float]()
        for _ in range(1 if aggregation.learnt else self.passes):
            losses.append(context.cases.epoch([train_step], SAMPLE, math.ceil(self.share * context.cases.steps)))
            if len(losses) > JUDGED and pstdev(losses[-JUDGED:]) < self.settled:
                break
        aggregation.learnt.fill_(True)
        copy_into(own, mean)
        own.load_state_dict(mixture(), strict=False)

    def learn(self, context: TrainContext) -> float:
        # without validation in this round, the received mean has not been combined with the site's model yet
        self.personalise(context)
        return context.train()

    def _weighed(self, model: nn.Module) -> list[str]:
        return names_of_last_layers(model, self.layers)


class Mixture:
    """Computes θ + (w̄ − θ) ⊙ W with the current W, for the tensors to which W applies."""

    def __init__(self, module: nn.Module, mean: nn.Module, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self.mean, self.weights = mean, dict(zip(names, weights, strict=True))
        self.start = {name: module.get_parameter(name).detach().clone() for name in names}
        self.way = {name: mean.get_parameter(name) - self.start[name] for name in names}

    def __call__(self) -> dict[str, Tensor]:
        return {name: self.start[name] + self.way[name] * weight for name, weight in self.weights.items()}

    def train_step(self, context: TrainContext, step: float) -> TrainStep:
        """Return a training step that updates W by gradient descent on a batch, and clips the elements of W to
        [0, 1].
        """

        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            layers = {name: tensor.requires_grad_() for name, tensor in self().items()}
            with keeping_statistics(self.mean), context.compute.cast():
                loss = context.loss(called_with(self.mean, layers, inputs), targets)
            slopes = torch.autograd.grad(loss, list(layers.values()))
            for (name, weight), slope in zip(self.weights.items(), slopes, strict=True):
                weight.sub_(step * slope * self.way[name]).clamp_(0, 1)
            return loss.detach()

        self.mean.train()
        return learn
