"""APFL: Deng et al., Adaptive Personalized Federated Learning, 2020."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.tensors import Modules
from medsilo.learning.compute import LossFunction
from medsilo.learning.loop import ObjectiveFunction, TrainStep
from medsilo.learning.steps import called_with, keeping_statistics
from medsilo.methods.bases import SharedAndOwn, copy_into
from medsilo.schedule.phase import ModelFactory
from medsilo.schedule.train_context import TrainContext


class Share(nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))


class APFL(SharedAndOwn):
    """Each site trains a local model v and FedAvg's shared model w, and predicts with α v + (1 − α) w.

    On each batch, w takes a step of FedAvg, and v ← v − η α ∇f(α v + (1 − α) w). In each step, the gradients for v and
    for w are both computed before v or w changes. The mixture of v and w is used only for predictions, and never
    replaces v.
    """

    title = "APFL"
    paper = "Deng et al. 2020"
    sends = "shared model"
    stays = "the hospital's own model, and the weight of this model in the mixture"
    extra_work = "two networks learn"
    suits = "a personal model for each hospital, if predictions should mix it with the shared model"
    own_loop: ClassVar[bool] = True
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["apfl"] = "apfl"
    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="α: the share of the site's local model in the mixture; 0 is FedAvg, 1 is single-site training",
    )
    adaptive: bool = Field(
        False, description="whether each site adjusts α once per round, with the plan's learning rate"
    )

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        return {**modules, "local": deepcopy(modules["global"]), "share": Share(self.alpha)}

    @torch.no_grad()
    def personalise(self, context: TrainContext) -> None:
        """Mix the weights of v and w, but use the running statistics of v, because v measures statistics on batches
        with the mixed weights.
        """
        model, w, v, alpha = _parts(context.modules)
        copy_into(model, v)
        for mixed, own, shared in zip(model.parameters(), v.parameters(), w.parameters(), strict=True):
            mixed.copy_(torch.lerp(shared, own, alpha))

    @contextmanager
    def learning(self, context: TrainContext) -> Iterator[Sequence[TrainStep]]:
        _, w, _, alpha = _parts(context.modules)
        train_step = context.train_step("local", interpolated(context.loss, w, alpha))
        if self.adaptive:
            train_step = choosing_alpha(train_step, context)
        yield train_step, context.train_step("global")


def _parts(modules: Modules) -> tuple[nn.Module, nn.Module, nn.Module, Tensor]:
    return modules["model"], modules["global"], modules["local"], cast(Tensor, modules["share"].alpha)


def interpolated(loss: LossFunction, shared: nn.Module, alpha: Tensor) -> ObjectiveFunction:
    """Return the objective f(α v + (1 − α) w) as a function of v alone; the shared model w receives no gradient."""

    def objective(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        weights = dict(shared.named_parameters())
        mixed = {name: torch.lerp(weights[name].detach(), v, alpha) for name, v in module.named_parameters()}
        return loss(called_with(module, mixed, inputs), targets)

    return objective


def choosing_alpha(step: TrainStep, context: TrainContext) -> TrainStep:
    """Return a training step that updates the mixing share α once, before the first batch, and then equals the given
    training step.

    The update is α ← α − η ⟨v − w, ∇f(α v + (1 − α) w)⟩, clamped to [0, 1].
    """
    _, w, v, alpha = _parts(context.modules)
    chosen = False

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal chosen
        if not chosen:
            chosen = True
            slope = alpha.clone().requires_grad_()
            with keeping_statistics(v), context.compute.cast():
                height = interpolated(context.loss, w, slope)(v, inputs, targets)
            (gradient,) = torch.autograd.grad(height, slope)
            alpha.sub_(context.training.learning_rate * gradient).clamp_(0, 1)
        return step(inputs, targets)

    return learn
