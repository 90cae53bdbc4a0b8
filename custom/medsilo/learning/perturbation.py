"""HarmoFL's weight perturbation: training uses gradients at nearby weights with a higher loss, which leads to flat
minima.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.learning.loop import Closure, Step
from medsilo.learning.steps import keeping_statistics


class PerturbedOptimizer(Optimizer):
    """Wraps a PyTorch optimizer, and replaces the gradient ∇ℓ(θ) by ∇ℓ(θ + δ) (HarmoFL's Equations 6 and 7).

    The perturbation of the weights θ is δ = α g / (‖g‖ + eps), where g = ∇ℓ(θ).

    Args:
        base: The wrapped optimizer. Its weight decay uses the unperturbed θ, and does not change g.
        alpha: α, the length of the perturbation. The norm ‖g‖ covers all parameters together.
        eps: The number that is added to ‖g‖ to avoid a division by zero.
        module: The network, if only the first of both passes should update its running batch-norm statistics.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(2, 1), torch.ones(4, 2)
    >>> optimizer = PerturbedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), alpha=0.05)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> float(optimizer.step(closure)) > float(closure())
    True
    """

    def __init__(self, base: Optimizer, alpha: float, eps: float = 1e-12, module: nn.Module | None = None) -> None:
        if not alpha >= 0:
            raise ValueError(f"alpha is {alpha}: the length of a perturbation must not be negative")
        super().__init__(base.param_groups, base.defaults)
        self.base, self.alpha, self.eps, self.module = base, alpha, eps, module
        self._follow_base()

    def _follow_base(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure: Closure) -> Tensor:  # type: ignore[override]
        """Make one optimizer step that uses the gradient at the perturbed weights, and return the loss at the
        unperturbed weights.

        Args:
            closure: Clears the gradients, computes the loss of the batch and the new gradients, and returns the loss.
        """
        loss = perturbed_gradients(self, closure, self.alpha, self.eps, self.module)
        self.base.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "base" in self.__dict__:
            self.base.add_param_group(param_group)
        else:  # Optimizer.__init__ calls this method before self.base exists
            unwrap(Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self._follow_base()


@torch.no_grad()
def perturbed_gradients(
    optimizer: Optimizer, closure: Closure, alpha: float, eps: float = 1e-12, module: nn.Module | None = None
) -> Tensor:
    """Set the gradients of an optimizer's weights to ∇ℓ(θ + δ), and return the loss ℓ(θ).

    With α = 0, the gradient is ∇ℓ(θ), which needs only one pass through the network.
    """
    with torch.enable_grad():
        loss = closure()
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if moved and alpha:
        elsewhere = _perturbed(moved, alpha, eps)
        optimizer.zero_grad()
        keeping = keeping_statistics(module) if module is not None else nullcontext()
        with _standing_at(moved, elsewhere), keeping, torch.enable_grad():
            closure()
    return loss


def _perturbed(moved: list[Tensor], alpha: float, eps: float) -> Sequence[Tensor]:
    """Return the perturbed weights θ + δ of HarmoFL's Equation 6, and write δ into the gradients."""
    gradients = [p.grad for p in moved if p.grad is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.promote_types(gradients[0].dtype, torch.float32))
    norm = torch.linalg.vector_norm(torch.stack(norms))
    torch._foreach_mul_(gradients, alpha / (norm + eps))
    return torch._foreach_add(moved, gradients)


@contextmanager
def _standing_at(parameters: list[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """When the context ends, restores the parameters from copies, because subtracting the perturbation δ would leave
    rounding errors.
    """
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, value in zip(parameters, own, strict=True):
            parameter.data = value


def perturbed_step(alpha: float, model: nn.Module, optimizer: Optimizer) -> Step:
    """Return a training step that performs lines 9 to 12 of HarmoFL's Algorithm 1."""
    perturbed = PerturbedOptimizer(optimizer, alpha, module=model)
    return lambda _, closure: perturbed.step(cast(Closure, closure))
