"""Compute HarmoFL's perturbed gradients inside a user's plain training loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.learning.perturbation import perturbed_gradients


class LaterGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, asks: Tensor, make: Callable[[Tensor], None]) -> Tensor:
        ctx.make = make
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, None, None]:
        ctx.make(factor)
        return None, None, None


class PerturbedLoss:
    """Makes the loss of a script compute gradients at perturbed weights, before the script clips or rescales the
    gradients.

    The argument `loss` is the PyTorch module that the script calls on a network's output.
    """

    def __init__(self, alpha: float, loss: object) -> None:
        self.alpha = alpha
        self.by_method = False  # True while the method, and not the script, iterates over the loader
        # the network's last output, the network, its optimizer, and a function that repeats the forward pass
        self.passed: tuple[Any, nn.Module, Optimizer, Callable[[], Any]] | None = None
        # True if all gradients since the last optimizer step were computed at perturbed weights
        self.fits: bool | None = None
        if alpha and isinstance(loss, nn.Module):
            loss.register_forward_hook(lambda *called: self._take(*called), with_kwargs=True)

    def watch(self, network: nn.Module, optimizer: Callable[[], Optimizer]) -> None:
        """Record each output of a network together with a function that repeats the forward pass."""

        def answered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.is_grad_enabled():
                self.passed = output, network, optimizer(), partial(network.forward, *args, **kwargs)

        if self.alpha:
            network.register_forward_hook(answered, with_kwargs=True)

    def _take(self, loss: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> Tensor | None:
        if self.by_method or not value.requires_grad:
            return None
        passed, self.passed = self.passed, None
        output, *targets = args or (None,)
        if passed is None or output is not passed[0]:
            self.fits = False
            return None
        _, network, optimizer, again = passed
        device = value.device.type
        casts, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def repeated() -> Tensor:
            with torch.autocast(device, dtype, enabled=casts, cache_enabled=False):
                return loss.forward(again(), *targets, **kwargs)

        def make(factor: Tensor) -> None:
            earlier = [(own, own.grad) for group in optimizer.param_groups for own in group["params"]]
            passes = iter((lambda: value, repeated))

            def closure() -> Tensor:
                optimizer.zero_grad()
                found = next(passes)()
                found.backward(factor)
                return found

            perturbed_gradients(optimizer, closure, self.alpha, module=network)
            # gradients from before this step are added, because the script may accumulate the gradients of several
            # batches
            for own, grad in earlier:
                own.grad = own.grad if grad is None else grad if own.grad is None else grad + own.grad
            self.fits = self.fits is not False

        return LaterGradients.apply(value.detach(), torch.zeros((), requires_grad=True), make)

    def refuse_plain(self) -> None:
        """Raise MedsiloError if an optimizer step would use unperturbed gradients."""
        fits, self.fits = self.fits, None
        if self.alpha and not self.by_method and not fits:
            raise MedsiloError(
                "optimizer.step: this method computes the loss twice; give join loss=, a torch module that your loop "
                "calls on the network's whole output"
            )
