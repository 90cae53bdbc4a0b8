"""Define helpers for methods that correct gradients, sum gradients, or call a network with weights that are not its
own.

The class `Moments` makes Adam's moments available as tensors that sites and the server can exchange.
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

Correction = Callable[[], None]  # a function that changes the weights' gradients in place


@contextmanager
def correcting(optimizer: Optimizer, correction: Correction) -> Iterator[None]:
    """Within the context, correct the gradients before each step of an optimizer.

    Args:
        optimizer: the optimizer
        correction: a function that changes the gradients in place
    """
    hook = optimizer.register_step_pre_hook(lambda *_: correction())
    try:
        yield
    finally:
        hook.remove()


def pull_back(parameters: Sequence[Tensor], mu: float, to: Sequence[Tensor] | None = None) -> Correction:
    """Return a correction that adds μ (w − w_t) to each gradient, the gradient of the proximal term μ/2 ‖w − w_t‖².

    >>> weight = nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.zeros(1)
    >>> pull_back([weight], mu=0.1, to=[torch.zeros(1)])()
    >>> weight.grad
    tensor([0.1000])

    Args:
        parameters: the weights w
        mu: μ
        to: the tensors w_t, which the function copies; by default, the present weights
    """
    return pull_towards(parameters, [anchor.detach().clone() for anchor in to or parameters], mu)


def pull_towards(parameters: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> Correction:
    """Return a correction that adds μ (w − w′) to each gradient, where the tensors w′ may change.

    Args:
        parameters: the weights w
        anchors: the tensors w′, which are read when the correction is called
        mu: μ
    """

    @torch.no_grad()
    def pull() -> None:
        pairs = [(p, a, p.grad) for p, a in zip(parameters, anchors, strict=True) if p.grad is not None]
        weights, near, gradients = map(list, zip(*pairs, strict=True))
        torch._foreach_add_(gradients, torch._foreach_sub(weights, near), alpha=mu)

    return pull


class Shift:
    """Adds a correction s to the gradients g, and computes the mean of the gradients g before the correction.

    Args:
        shifts: the tensors s
        decay: the weight decay, whose gradient is added in the mean
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
    """Adam's first and second moments for the weights of a network, and the number of Adam's steps.

    The server averages Adam's number of steps over sites, like the moments, so the number need not be an integer. The
    average number of steps makes Adam's bias correction right even for a site that missed rounds.
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
        """Set the state of an Adam optimizer to the given moments; the optimizer then updates these moments in
        place.
        """
        for index, parameter in enumerate(_weights(optimizer)):
            optimizer.state[parameter] = {
                # Adam needs a step counter for each weight, and the counter must be in the CPU's memory
                "step": self.steps.cpu().clone(),
                "exp_avg": self.get_buffer(f"first_{index}"),
                "exp_avg_sq": self.get_buffer(f"second_{index}"),
            }

    def take_back(self, optimizer: Optimizer) -> None:
        """Copy the number of steps from an Adam optimizer; the optimizer has already updated the moments in place."""
        self.steps.copy_(optimizer.state[_weights(optimizer)[0]]["step"])


class GradientSum:
    """Sums the gradients of many batches at the same weights, and then makes one optimizer step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.total = [torch.zeros_like(parameter) for parameter in _weights(optimizer)]

    def collect(self, optimizer: Optimizer, closure: Closure) -> Tensor:
        loss = closure()
        for total, parameter in zip(self.total, _weights(optimizer), strict=True):
            total.add_(cast(Tensor, parameter.grad))
        return loss

    def step(self, optimizer: Optimizer) -> None:
        for parameter, gradient in zip(_weights(optimizer), self.total, strict=True):
            parameter.grad = gradient
        optimizer.step()


def _weights(optimizer: Optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def called_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the output of a network that uses the given weights for this call.

    A weight with two names, as in nnU-Net, is replaced under one name only; otherwise PyTorch does not restore it.

    Args:
        model: the network
        weights: the weights by name; the network's own weights replace missing weights
        inputs: a batch of inputs
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
    """Within the context, freeze all parameters except the parameters with the given names.

    Momentum and weight decay do not change frozen parameters either.

    Args:
        module: the network
        names: names of the parameters that learn
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
    """Within the context, stop batch norms from updating their running statistics and counters."""
    tracking = [layer for layer in batch_norm_layers(module) if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


def with_features(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    output, given = with_given(model, inputs)
    return output, given.flatten(1)


def with_given(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
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
    return with_features(model.eval(), inputs)[1]
