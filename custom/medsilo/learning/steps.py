"""Tools of methods whose step is not the plain one: they correct gradients, sum them, or call a network otherwise.

Also Adam's memory as tensors that can travel.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.learning.layers import batch_norm_layers, head_layers
from medsilo.learning.loop import Closure

Correction = Callable[[], None]  # changes the gradients that lie in the weights


@contextmanager
def correcting(optimizer: Optimizer, correction: Correction) -> Iterator[None]:
    """Inside, the gradients are corrected just before every step, whichever step computed them."""
    hook = optimizer.register_step_pre_hook(lambda *_: correction())
    try:
        yield
    finally:
        hook.remove()


def pull_back(parameters: Sequence[Tensor], mu: float, to: Sequence[Tensor] | None = None) -> Correction:
    """The correction for ℓ(w) + μ/2 ‖w − w_t‖²: adds μ (w − w_t) to every gradient.

    w_t: the weights as they are now, or others as these are now, which may go on training.
    """
    return pull_towards(parameters, [anchor.detach().clone() for anchor in to or parameters], mu)


def pull_towards(parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> Correction:
    """Adds μ (w − w′) to every gradient, w′ being what the anchors hold when the step is made."""

    @torch.no_grad()
    def pull() -> None:
        pairs = [(p, a, p.grad) for p, a in zip(parameters, anchors, strict=True) if p.grad is not None]
        weights, near, gradients = map(list, zip(*pairs, strict=True))
        torch._foreach_add_(gradients, torch._foreach_sub(weights, near), alpha=mu)

    return pull


class Shift:
    """The correction g ← g + s, which also knows the mean of all g that it has met, the weights' decay included."""

    def __init__(self, parameters: Sequence[Tensor], shifts: Sequence[Tensor], decay: float = 0.0) -> None:
        self.parameters, self.shifts, self.decay = parameters, shifts, decay
        self.total = [torch.zeros_like(parameter) for parameter in parameters]
        self.steps = 0

    @torch.no_grad()
    def __call__(self) -> None:
        self.steps += 1
        for parameter, shift, total in zip(self.parameters, self.shifts, self.total, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad).add_(parameter, alpha=self.decay)
                parameter.grad.add_(shift)

    def mean(self) -> list[Tensor]:
        """Of the gradients before they were shifted."""
        return [total / self.steps for total in self.total]


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


def called_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return what a network answers with these weights in the place of its own, which are back in place afterwards.

    Each place is named once: PyTorch leaves weights behind that it finds by two names in one layer, as nnU-Net has it.
    """
    given = {id(own): weights[name] for name, own in model.named_parameters() if name in weights}
    places = {
        f"{prefix}.{name}" if prefix else name: given[id(own)]
        for prefix, layer in model.named_modules()
        for name, own in layer.named_parameters(recurse=False)
        if id(own) in given
    }
    return functional_call(model, places, (inputs,), tie_weights=False)


@contextmanager
def learning_only(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, only these parameters learn; an optimizer leaves all others as they are, momentum and decay included."""
    held = [weight for name, weight in module.named_parameters() if weight.requires_grad and name not in names]
    for weight in held:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in held:
            weight.requires_grad_()


@contextmanager
def keeping_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, batch norms train as ever, but their running statistics and counters stay as they are."""
    tracking = [layer for layer in batch_norm_layers(module) if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


def with_features(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the network's output, and what its head was given, one row per case: [B, features]."""
    output, given = with_given(model, inputs)
    return output, given.flatten(1)


def with_given(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the network's output, and what its head was given."""
    given: list[Tensor] = []
    (head,) = head_layers(model)
    hook = head.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    try:
        output = model(inputs)
    finally:
        hook.remove()
    if not given:
        raise MedsiloError(
            "the network's last layer was called unseen; join with the network as it was before compiling"
        )
    return output, given[-1]


@torch.no_grad()
def frozen_features(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the features of a network that doesn't learn, in evaluation."""
    return with_features(model.eval(), inputs)[1]
