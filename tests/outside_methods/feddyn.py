"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, 2021."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.tensors import Modules
from medsilo.course.server_side import ServerSide
from medsilo.course.workbench import Blueprint, Workbench
from medsilo.learning.steps import correcting, pull_towards
from medsilo.methods.server_step import ServerStep
from medsilo.mixing.server import ServerOptimizer


class FedDyn(ServerStep):
    """Sites minimise f_k(w) - <g_k, w> + α/2 ‖w - w_t‖², then g_k ← g_k - α (w_k - w_t)."""

    title = "FedDyn"
    paper = "Acar et al. 2021"

    name: Literal["feddyn"] = "feddyn"
    weighting: Literal["uniform"] = "uniform"
    alpha: float = Field(0.1, gt=0, le=10, description="strength of the dynamic regulariser (α)")

    def networks(self, build: Blueprint) -> Modules:
        modules = super().networks(build)
        zeros = (nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in modules["model"].parameters())
        return modules | {"gradient": nn.ParameterList(zeros)}

    def step(self, server: ServerSide) -> "DynamicStep":
        return DynamicStep(self.alpha)

    def work(self, bench: Workbench) -> float:
        weights = list(bench.modules["model"].parameters())
        gradients = list(bench.modules["gradient"].parameters())
        arrived = [weight.detach().clone() for weight in weights]
        pull = pull_towards(weights, arrived, self.alpha)

        def correct() -> None:
            pull()
            for weight, gradient in zip(weights, gradients, strict=True):
                if weight.grad is not None:
                    weight.grad.sub_(gradient)

        with correcting(bench.optimizers["model"], correct):
            loss = bench.train()
        with torch.no_grad():
            for gradient, weight, before in zip(gradients, weights, arrived, strict=True):
                gradient.sub_(weight - before, alpha=self.alpha)
        return loss


class DynamicStep(ServerOptimizer):
    """h ← h - α/N Σ (w_k - w) over those of the N sites that answered; w ← mean(w_k) - h/α."""

    first = (0.0,)

    def __init__(self, alpha: float) -> None:
        super().__init__(lr=1.0, uniform=True)
        self.alpha = alpha

    def update(self, d: Tensor, *memory: Tensor) -> Tensor:
        (h,) = memory
        h.sub_(d, alpha=self.alpha * self.participation)
        return d - h / self.alpha
