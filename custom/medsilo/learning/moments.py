"""Adam's memory as tensors that can travel, and steps with the gradient of many batches."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.learning.steps import Closure


class Moments(nn.Module):
    """Adam's first and second moments for a network's weights, and the number of steps behind them.

    The number is no whole one: like the moments it may be a mean over sites, and Adam's correction of young moments
    then fits them also at a site that missed some rounds.
    """

    steps: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.count = 0
        for parameter in network.parameters():
            for moment in ("first", "second"):
                self.register_buffer(f"{moment}_{self.count}", torch.zeros_like(parameter, requires_grad=False))
            self.count += 1
        self.register_buffer("steps", torch.zeros(()))

    def lend(self, optimizer: Optimizer) -> None:
        """Adam goes on from these moments, in place."""
        for index, parameter in enumerate(_weights(optimizer)):
            optimizer.state[parameter] = {
                "step": self.steps.cpu().clone(),  # Adam counts on the CPU, for each tensor by itself
                "exp_avg": self.get_buffer(f"first_{index}"),
                "exp_avg_sq": self.get_buffer(f"second_{index}"),
            }

    def take_back(self, optimizer: Optimizer) -> None:
        """The moments have changed in place; the number of steps follows."""
        self.steps.copy_(optimizer.state[_weights(optimizer)[0]]["step"])


class GradientSum:
    """Collects the gradients of many batches, at the same weights, for one step with their sum."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.total = [torch.zeros_like(parameter) for parameter in _weights(optimizer)]

    def collect(self, optimizer: Optimizer, closure: Closure) -> Tensor:
        """A `Step` that changes no weight."""
        loss = closure()
        for total, parameter in zip(self.total, _weights(optimizer), strict=True):
            total.add_(cast(Tensor, parameter.grad))
        return loss

    def step(self, optimizer: Optimizer) -> None:
        """The one step."""
        for parameter, gradient in zip(_weights(optimizer), self.total, strict=True):
            parameter.grad = gradient
        optimizer.step()


def _weights(optimizer: Optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]
