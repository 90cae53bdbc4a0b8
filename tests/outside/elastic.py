"""Elastic aggregation: Chen et al., Elastic Aggregation for Federated Optimization, 2023."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.steps import keeping_statistics
from medsilo.methods.bases import ServerStep, trained_weights
from medsilo.mixing.aggregators import Aggregator, WeightedMean, step
from medsilo.mixing.layout import Layout, spread
from medsilo.schedule.phase import Group, ModelFactory, ServerSide
from medsilo.schedule.train_context import TrainContext


class Elastic(ServerStep):
    """Compute w ← w + ζ · mean(w_k - w) with ζ = 1 + τ - Ω / max Ω, so that more sensitive weights move less."""

    title = "Elastic aggregation"
    paper = "Chen et al. 2023"

    name: Literal["elastic"] = "elastic"
    tau: float = Field(
        0.5,
        ge=0,
        le=1,
        description="how far the least sensitive weights move beyond the sites' mean (τ)",
    )
    decay: float = Field(0.95, ge=0, lt=1, description="weight of earlier batches in a sensitivity (μ)")

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        zeros = (nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in modules["model"].parameters())
        return modules | {"sensitivity": nn.ParameterList(zeros)}

    def groups(self) -> tuple[Group, ...]:
        sensitivity = Group(
            "sensitivity", sensitivities, self.mean, travels="up", title="how sensitive weights are", check=possible
        )
        return sensitivity, *super().groups()

    def step(self, server: ServerSide) -> Aggregator:
        return ElasticMean(lambda: self.rates(server), self.weighting == "uniform")

    def rates(self, server: ServerSide) -> Mapping[str, Tensor]:
        """Return ζ for every weight, from the mean of the sites' sensitivities, which the server aggregates before the
        weights.
        """
        omega = server.aggregators["sensitivity"].current(server.sites[0])
        largest = max(float(tensor.max()) for tensor in omega.values())
        return {name: 1 + self.tau - tensor.double() / (largest or 1.0) for name, tensor in omega.items()}

    def train_round(self, context: TrainContext) -> float:
        self.measure(context)
        return super().train_round(context)

    def measure(self, context: TrainContext) -> None:
        """After each batch, update Ω_k ← μ Ω_k + (1 - μ) |∇f_k(w)|, where w is the received model."""
        model = context.modules["model"].train()
        weights, omega = list(model.parameters()), list(context.modules["sensitivity"].parameters())
        torch._foreach_zero_(omega)
        with keeping_statistics(model):
            for inputs, targets in context.cases.in_order():
                with context.compute.cast():
                    loss = context.loss(model(inputs), targets)
                for total, gradient in zip(omega, torch.autograd.grad(loss, weights), strict=True):
                    total.mul_(self.decay).add_(gradient.abs(), alpha=1 - self.decay)


class ElasticMean(WeightedMean):
    _is_mean = False

    def __init__(self, rates: Callable[[], Mapping[str, Tensor]], uniform: bool) -> None:
        super().__init__()
        self.rates, self.uniform = rates, uniform

    def _move(self, blocks: Iterator[tuple[Tensor, Tensor]], layout: Layout) -> None:
        step(blocks, spread(self.rates(), layout), layout)


def sensitivities(modules: Modules) -> Tensors:
    return dict(zip(trained_weights(modules), modules["sensitivity"].parameters(), strict=True))


def possible(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.min() < 0:
            raise Refused(f"sensitivity/{name} is below 0, but a mean of absolute values is not negative")
