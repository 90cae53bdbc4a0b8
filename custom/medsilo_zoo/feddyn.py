"""FedDyn (Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021)."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.extend.methods import (
    Aggregator,
    DynamicStep,
    ModelFactory,
    Modules,
    Private,
    ServerSide,
    ServerStep,
    TrainContext,
    correcting,
    learning_weights,
    pull_towards,
    zeros_like,
)


class FedDyn(ServerStep):
    """Sites minimise f_k(w_k) − ⟨g_k, w_k⟩ + α/2 ‖w_k − w‖². After training, a site updates g_k ← g_k − α (w_k − w),
    and g_k never leaves the site.

    The server computes h ← h − α/N Σ (w_k − w) and then w ← mean(w_k) − h/α over the sites that answered. In the
    formula for h, N is the number of all sites. All sites have the same weight in the mean.
    """

    title = "FedDyn"
    paper = "Acar et al. 2021"
    sends = "model, running statistics"
    stays = "the hospital's linear term"
    suits = "many local steps, with half of SCAFFOLD's network traffic"

    name: Literal["feddyn"] = "feddyn"
    weighting: Literal["uniform"] | None = "uniform"
    alpha: float = Field(0.01, gt=0, le=1000, description="α: strength of the dynamic regulariser")

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        return modules | {"gradient": zeros_like(modules["model"])}

    def private(self) -> Private:
        return Private(
            ("model",), disclosure_notes="g_k and h follow from noisy weights; the pull is added to the noisy gradient"
        )

    def step(self, server: ServerSide) -> Aggregator:
        return DynamicStep(self.alpha)

    def train_round(self, context: TrainContext) -> float:
        """Train with a pull of the weights towards w + g_k/α, by adding − g_k + α (w_k − w) to the gradient."""
        weights = learning_weights(context.modules["model"])
        gradients: list[Tensor] = list(context.modules["gradient"].parameters())
        arrived = [weight.detach().clone() for weight in weights]
        pull = pull_towards(weights, torch._foreach_add(arrived, gradients, alpha=1 / self.alpha), self.alpha)
        with correcting(context.optimizers["model"], pull):
            loss = context.train()
        with torch.no_grad():
            for gradient, weight, before in zip(gradients, weights, arrived, strict=True):
                gradient.sub_(weight - before, alpha=self.alpha)
        return loss
