"""A site's own network beside the one that all sites share: what each personal method makes of the pair.

v, θ or "own" is the site's network, w the shared one. Each piece is a lesson, or what turns one into the method's: an
objective or a correction of gradients. Running statistics of batch norm are each network's own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from medsilo.learning.layers import batch_norm_buffer_names, called_with, keeping_statistics
from medsilo.learning.loop import Compute, Lesson, LossFunction, Objective
from medsilo.learning.steps import Correction, pull_towards

Batch = tuple[Tensor, Tensor]


def copy_into(own: nn.Module, shared: nn.Module) -> None:
    """own ← w, running statistics included."""
    own.load_state_dict(shared.state_dict())


# ---------------------------------------------------------------------------------------------------- Ditto
def near_as_it_arrived(own: nn.Module, shared: nn.Module, strength: float) -> Correction:
    """Ditto: adds λ (v − w_t) to v's gradient, w_t being w as it is now; w may go on training."""
    arrived = [parameter.detach().clone() for parameter in shared.parameters()]
    return pull_towards(list(own.parameters()), arrived, strength)


# ---------------------------------------------------------------------------------------------------- APFL
def interpolated(loss: LossFunction, shared: nn.Module, alpha: Tensor) -> Objective:
    """APFL: f(α v + (1 − α) w) as an objective of v, whose gradient is α ∇f; w gets none."""

    def objective(own: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        weights = dict(shared.named_parameters())
        mixed = {name: torch.lerp(weights[name].detach(), v, alpha) for name, v in own.named_parameters()}
        return loss(called_with(own, mixed, inputs), targets)

    return objective


@torch.no_grad()
def interpolate(into: nn.Module, own: nn.Module, shared: nn.Module, alpha: Tensor) -> None:
    """The network that predicts: weights α v + (1 − α) w, running statistics of the passes with such weights, v's."""
    copy_into(into, own)
    for mixed, v, w in zip(into.parameters(), own.parameters(), shared.parameters(), strict=True):
        mixed.copy_(torch.lerp(w, v, alpha))


def choosing_alpha(
    lesson: Lesson, own: nn.Module, shared: nn.Module, alpha: Tensor, loss: LossFunction, rate: float, compute: Compute
) -> Lesson:
    """The lesson, and before its first batch α ← α − η ⟨v − w, ∇f(α v + (1 − α) w)⟩, kept within [0, 1]."""
    chosen = False

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal chosen
        if not chosen:
            chosen = True
            slope = alpha.clone().requires_grad_()
            with keeping_statistics(own), compute.cast():
                height = interpolated(loss, shared, slope)(own, inputs, targets)
            (gradient,) = torch.autograd.grad(height, slope)
            alpha.sub_(rate * gradient).clamp_(0, 1)
        return lesson(inputs, targets)

    return learn


# ---------------------------------------------------------------------------------------------------- Per-FedAvg
class MetaGradient:
    """Per-FedAvg: the gradient ∇f(u; D′) at u = w − a ∇f(w; D), with D′ the batch at hand.

    D is the batch before it, so that both are independent and each is loaded once; a round's first batch stands in for
    that before it. Running statistics are those of the passes with w over D.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, rate: float, compute: Compute) -> None:
        self.model, self.loss, self.rate, self.compute = model, loss, rate, compute
        self.batches: list[Batch] = []

    def lesson(self, inner: Lesson) -> Lesson:
        """A lesson on `objective` that is told of each batch."""

        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            self.batches = [*self.batches[-1:], (inputs, targets)]
            return inner(inputs, targets)

        return learn

    def objective(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """f(u; D′) as an objective of w. Its gradient leaves the second derivative out: ∇f(u; D′), first order."""
        before, targets_before = self.batches[0]
        with self.compute.cast():
            loss = self.loss(self.model(before), targets_before)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), materialize_grads=True)
        adapted = {name: w - self.rate * g for (name, w), g in zip(model.named_parameters(), gradients, strict=True)}
        with keeping_statistics(model):
            return self.loss(called_with(model, adapted, inputs), targets)


def adapt(
    model: nn.Module, objective: Objective, rate: float, epoch: Callable[[Sequence[Lesson]], object], compute: Compute
) -> None:
    """One step w ← w − a ∇f(w) with the gradient over everything that the epoch goes through."""
    model.train()
    model.zero_grad()
    cases = 0

    def gather(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal cases
        with compute.cast():
            loss = objective(model, inputs, targets)
        (loss * len(inputs)).backward()
        cases += len(inputs)
        return loss.detach()

    epoch([gather])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate / cases)
    model.zero_grad()


# ---------------------------------------------------------------------------------------------------- pFedMe
@torch.no_grad()
def set_out_from(own: nn.Module, shared: nn.Module) -> None:
    """θ ← w, the weights; θ keeps its running statistics."""
    torch._foreach_copy_(list(own.parameters()), list(shared.parameters()))


def moreau(inner: Lesson, own: nn.Module, shared: nn.Module, steps: int, rate: float) -> Lesson:
    """pFedMe: K steps of θ on one batch, then w ← w − ηλ (w − θ); `rate` is ηλ.

    The inner lesson's optimizer must be under `pull_towards(θ, w, λ)`: it minimises f(θ) + λ/2 ‖θ − w‖². w's running
    statistics are those of one pass of its own.
    """
    measured = bool(batch_norm_buffer_names(shared))
    shared.train()

    @torch.no_grad()
    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            loss, *_ = [inner(inputs, targets) for _ in range(steps)]
        if measured:
            shared(inputs)
        torch._foreach_lerp_(list(shared.parameters()), list(own.parameters()), rate)
        return loss

    return learn
