"""What one mini-batch does to the weights. A step is given the optimizer and a closure that computes gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Tensor]
Step = Callable[[Optimizer, Closure], Tensor]
Correction = Callable[[], None]  # changes the gradients that lie in the weights


def plain_step(optimizer: Optimizer, closure: Closure) -> Tensor:
    """θ ← θ − lr · ∇ℓ(θ), whatever the optimizer makes of it."""
    loss = closure()
    optimizer.step()
    return loss


@contextmanager
def correcting(optimizer: Optimizer, correction: Correction) -> Iterator[None]:
    """Inside, the gradients are corrected just before every step, whichever step computed them."""
    hook = optimizer.register_step_pre_hook(lambda *_: correction())
    try:
        yield
    finally:
        hook.remove()


def pull_back(parameters: Sequence[Tensor], mu: float) -> Correction:
    """The correction for ℓ(w) + μ/2 ‖w − w_t‖²: adds μ (w − w_t) to every gradient, w_t being the weights now."""
    return pull_towards(parameters, [parameter.detach().clone() for parameter in parameters], mu)


def pull_towards(parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> Correction:
    """Adds μ (w − w′) to every gradient, w′ being what the anchors hold when the step is made."""

    @torch.no_grad()
    def pull() -> None:
        pairs = [(p, a, p.grad) for p, a in zip(parameters, anchors, strict=True) if p.grad is not None]
        weights, near, gradients = map(list, zip(*pairs, strict=True))
        torch._foreach_add_(gradients, torch._foreach_sub(weights, near), alpha=mu)

    return pull
