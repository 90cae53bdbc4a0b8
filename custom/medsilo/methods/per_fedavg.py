"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.learning.compute import Case, Compute, LossFunction
from medsilo.learning.loop import ObjectiveFunction, OutputLoss, TrainStep
from medsilo.learning.steps import called_with, keeping_statistics
from medsilo.methods.bases import SharedAndOwn, copy_into
from medsilo.schedule.train_context import TrainContext


class PerFedAvg(SharedAndOwn):
    """FedAvg of a model w that performs well after one gradient step at each site.

    The objective is min_w Σ p_k f_k(w − a ∇f_k(w)), and its gradients omit second derivatives. A site's personal model
    is the received w after one step with the gradient over all training data (the expectation in Equation 3).
    """

    title = "Per-FedAvg"
    paper = "Fallah et al. 2020"
    sends = "shared model"
    stays = "the adapted model"
    extra_work = "two gradients per batch; four with the Hessian-free variant"
    suits = "hospitals that adapt the shared model with one gradient step"
    own_step: ClassVar[bool] = True
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["per-fedavg"] = "per-fedavg"
    inner_lr: float = Field(
        0.01,
        ge=0,
        le=1000,
        description="a: step size with which a site adapts the shared model; the paper's step size b is the plan's "
        "learning rate",
    )

    def personalise(self, context: TrainContext) -> None:
        model = context.modules["model"]
        copy_into(model, context.modules["global"])
        adapt(
            model,
            OutputLoss(context.loss),
            self.inner_lr,
            lambda train_steps: context.cases.epoch(train_steps, 0),
            context.compute,
        )

    @contextmanager
    def learning(self, context: TrainContext) -> Iterator[Sequence[TrainStep]]:
        meta = MetaGradient(context.modules["global"], context.loss, self.inner_lr, context.compute)
        yield [meta.train_step(context.train_step("global", meta.objective))]


class MetaGradient:
    """The gradient ∇f(u; D′) at the adapted weights u = w − a ∇f(w; D), where D′ is the current batch.

    The batch D is the previous batch, so that D and the current batch D′ are independent and each batch is loaded only
    once. For the first batch of a round, D equals D′. The running statistics come from passing the batch D through the
    network with the weights w.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, rate: float, compute: Compute) -> None:
        self.model, self.loss, self.rate, self.compute = model, loss, rate, compute
        self.batches: list[Case] = []

    def train_step(self, inner: TrainStep) -> TrainStep:
        def learn(inputs: Tensor, targets: Tensor) -> Tensor:
            self.batches = [*self.batches[-1:], (inputs, targets)]
            return inner(inputs, targets)

        return learn

    def objective(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss f(u; D′) as a function of w, whose gradient omits second derivatives."""
        before, targets_before = self.batches[0]
        with self.compute.cast():
            loss = self.loss(self.model(before), targets_before)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), materialize_grads=True)
        adapted = {name: w - self.rate * g for (name, w), g in zip(model.named_parameters(), gradients, strict=True)}
        with keeping_statistics(model):
            return self.loss(called_with(model, adapted, inputs), targets)


def adapt(
    model: nn.Module,
    objective: ObjectiveFunction,
    rate: float,
    epoch: Callable[[Sequence[TrainStep]], object],
    compute: Compute,
) -> None:
    """Take one step w ← w − a ∇f(w) with the gradient over all cases of an epoch."""
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
