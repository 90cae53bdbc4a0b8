"""What one mini-batch does to the weights. A step is given the optimizer and a closure that computes gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Tensor]
Step = Callable[[Optimizer, Closure], Tensor]


def plain_step(optimizer: Optimizer, closure: Closure) -> Tensor:
    """θ ← θ − lr · ∇ℓ(θ), whatever the optimizer makes of it."""
    loss = closure()
    optimizer.step()
    return loss


def proximal_step(parameters: Sequence[Tensor], mu: float) -> Step:
    """The step for ℓ(w) + μ/2 ‖w − w_t‖²: adds μ (w − w_t) to every gradient, w_t being the weights now."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    anchor = [parameter.detach().clone() for parameter in trained]

    def step(optimizer: Optimizer, closure: Closure) -> Tensor:
        loss = closure()
        with torch.no_grad():
            pairs = [(p, a, p.grad) for p, a in zip(trained, anchor, strict=True) if p.grad is not None]
            weights, anchors, gradients = map(list, zip(*pairs, strict=True))
            torch._foreach_add_(gradients, torch._foreach_sub(weights, anchors), alpha=mu)
        optimizer.step()
        return loss

    return step
