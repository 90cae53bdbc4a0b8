"""Helpers for methods that change training steps: gradient corrections, gradient sums, calls with other weights.

`Moments` makes Adam's moments tensors that sites and server can exchange.
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

Correction = Callable[[], None]  # changes the weights' gradients in place


@contextmanager
def correcting(optimizer: Optimizer, correction: Correction) -> Iterator[None]:
    """Apply a correction to the gradients just before each step of the optimizer, within the block."""
    hook = optimizer.register_step_pre_hook(lambda *_: correction())
    try:
        yield
    finally:
        hook.remove()


def pull_back(parameters: Sequence[Tensor], mu: float, to: Sequence[Tensor] | None = None) -> Correction:
    """Return the correction for the proximal term μ/2 ‖w − w_t‖²: it adds μ (w − w_t) to every gradient.

    w_t is a copy of the weights, or of the tensors `to`, made at this call.
    """
    return pull_towards(parameters, [anchor.detach().clone() for anchor in to or parameters], mu)


def pull_towards(parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> Correction:
    """Return a correction that adds μ (w − w′) to every gradient, where w′ are the anchors' values at each step."""

    @torch.no_grad()
    def pull() -> None:
        pairs = [(p, a, p.grad) for p, a in zip(parameters, anchors, strict=True) if p.grad is not None]
        weights, near, gradients = map(list, zip(*pairs, strict=True))
        torch._foreach_add_(gradients, torch._foreach_sub(weights, near), alpha=mu)

    return pull


class Shift:
    """The correction g ← g + s, which also records the mean of all gradients g, with weight decay, before
    the shift s.
    """

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
        return [total / self.steps for total in self.total]


class Moments(nn.Module):
    """Adam's first and second moments for a network's weights, and its number of steps.

    The server averages the number of steps over sites, as it averages moments, so it may be a fraction. Adam's bias
    correction then also fits a site that missed some rounds.
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
        """Make an Adam optimizer continue from these moments, which it updates in place."""
        for index, parameter in enumerate(_weights(optimizer)):
            optimizer.state[parameter] = {
                "step": self.steps.cpu().clone(),  # Adam has a counter on the CPU for each tensor
                "exp_avg": self.get_buffer(f"first_{index}"),
                "exp_avg_sq": self.get_buffer(f"second_{index}"),
            }

    def take_back(self, optimizer: Optimizer) -> None:
        """Copy the number of steps back from Adam, which has updated the moments in place."""
        self.steps.copy_(optimizer.state[_weights(optimizer)[0]]["step"])


class GradientSum:
    """Sums the gradients of many batches at the same weights, for one optimizer step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.total = [torch.zeros_like(parameter) for parameter in _weights(optimizer)]

    def collect(self, optimizer: Optimizer, closure: Closure) -> Tensor:
        """A `Step` that adds the gradients to the sum and changes no weight."""
        loss = closure()
        for total, parameter in zip(self.total, _weights(optimizer), strict=True):
            total.add_(cast(Tensor, parameter.grad))
        return loss

    def step(self, optimizer: Optimizer) -> None:
        """Make one optimizer step with the summed gradients."""
        for parameter, gradient in zip(_weights(optimizer), self.total, strict=True):
            parameter.grad = gradient
        optimizer.step()


def _weights(optimizer: Optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def called_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Apply a network with these weights, then restore its previous weights.

    Each weight is replaced under one name only, because PyTorch does not restore a weight that a layer has under two
    names, as in nnU-Net.
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
    """Train only these parameters within the block. Momentum and weight decay do not change other
    parameters, either.
    """
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
    """Stop batch norms from updating their running statistics and counters within the block."""
    tracking = [layer for layer in batch_norm_layers(module) if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


def with_features(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the network's output, and the input of its head with one row per case: [B, features]."""
    output, given = with_given(model, inputs)
    return output, given.flatten(1)


def with_given(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the network's output and the unchanged input of its head."""
    given: list[Tensor] = []
    (head,) = head_layers(model)
    hook = head.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    try:
        output = model(inputs)
    finally:
        hook.remove()
    if not given:
        raise MedsiloError(
            "the inputs of the network's last layer can't be observed; join with the network as it was before compiling"
        )
    return output, given[-1]


@torch.no_grad()
def frozen_features(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a network's head in evaluation mode, [B, features], without gradients."""
    return with_features(model.eval(), inputs)[1]
