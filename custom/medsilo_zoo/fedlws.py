"""FedLWS (Shi et al., FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking, ICLR 2025)."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend.methods import PlanError, ServerSide, ServerStep, Shares, StalenessWeightedMean, Training


class FedLWS(ServerStep):
    """w^l ← γ^l Σ p_k w_k^l: the mean of every layer l is shrunk, and shrunk more if the sites' updates disagree in
    this layer.

    γ^l = ‖w^l‖ / (‖w^l‖ + τ^l ‖g^l‖), where w^l is the layer that the sites received, g_k^l = w_k^l − w^l and g^l = Σ
    p_k g_k^l. τ^l = β · 1/K Σ_k ‖g_k^l − 1/K Σ_j g_j^l‖ is clipped to the range from `least` to `most`. If all weights
    of a layer are zero, γ^l is 1, because with γ^l = 0 this layer would stay zero in all rounds.
    """

    title = "FedLWS"
    paper = "Shi et al. 2025 (FedLWS)"
    sends = "model, running statistics"
    extra_work = "none; the server computes more than with FedAvg"
    suits = "hospitals whose updates differ more in some layers than in others"
    undefended = (
        "mixing: fedlws shrinks layers by how far single hospitals are from each other, and no robust rule does; use "
        "fedavg"
    )

    name: Literal["fedlws"] = "fedlws"
    beta: float = Field(
        0.03, ge=0, le=1000, description="β: how strongly disagreement among the sites shrinks the weights of a layer"
    )
    least: float = Field(
        0.01, ge=0, le=10, description="smallest value of τ, the strength with which a layer's weights are shrunk"
    )
    most: float = Field(
        0.2, ge=0, le=10, description="largest value of τ, the strength with which a layer's weights are shrunk"
    )

    def check_training(self, training: Training) -> None:
        if self.least > self.most:
            raise PlanError(f"algorithm.least: {self.least:g} is more than algorithm.most={self.most:g}; lower it")

    def step(self, server: ServerSide) -> StalenessWeightedMean:
        return StalenessWeightedMean(self.shares, self.shrunk)

    def shares(self, mean: StalenessWeightedMean) -> Shares:
        return dict.fromkeys(mean.samples, 1.0) if self.weighting == "uniform" else mean.samples

    def shrunk(self, mean: StalenessWeightedMean) -> Shares:
        """Return the factor γ of every tensor; all tensors of a layer have the same factor."""
        weights = torch.tensor(list(self.shares(mean).values()), dtype=torch.float64)
        gammas = {layer: self.gamma(own, weights) for layer, own in mean.products(layer_of).items()}
        return {name: gammas[layer_of(name)] for name in mean.averaged}

    def gamma(self, products: Tensor, weights: Tensor) -> float:
        p, g = weights / weights.sum(), products[1:, 1:]
        norm, way = math.sqrt(products[0, 0]), math.sqrt(max(0.0, float(p @ g @ p)))
        apart = (g.diagonal() - 2 * g.mean(1) + g.mean()).clamp(min=0).sqrt().mean()
        tau = min(self.most, max(self.least, self.beta * float(apart)))
        return norm / (norm + tau * way) if norm else 1.0


def layer_of(name: str) -> str:
    """Return the name of a tensor's layer. The weight and the bias of a layer have the same layer name."""
    return name.rpartition(".")[0]
