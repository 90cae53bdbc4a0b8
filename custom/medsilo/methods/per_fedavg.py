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
    """FedAvg of a w that is good after one step: min_w Σ p_k f_k(w − a ∇f_k(w)), by gradients of the first order.

    A site's model is the received w after one step with the gradient over all its training data: the expectation of the
    paper's Eq. 3. Validation and test data are not used to adapt.
    """

    title = "Per-FedAvg"
    paper = "Fallah et al. 2020"
    own_step: ClassVar[bool] = True
    made_anew: ClassVar[frozenset[str]] = frozenset({"model"})

    name: Literal["per-fedavg"] = "per-fedavg"
    inner_lr: float = Field(0.01, ge=0, le=1000, description="a: the step of adaptation; the plan's learning rate is b")

    def personalise(self, bench: TrainContext) -> None:
        model = bench.modules["model"]
        copy_into(model, bench.modules["global"])
        adapt(
            model, OutputLoss(bench.loss), self.inner_lr, lambda lessons: bench.cases.epoch(lessons, 0), bench.compute
        )

    @contextmanager
    def learning(self, bench: TrainContext) -> Iterator[Sequence[TrainStep]]:
        meta = MetaGradient(bench.modules["global"], bench.loss, self.inner_lr, bench.compute)
        yield [meta.lesson(bench.lesson("global", meta.objective))]


class MetaGradient:
    """The gradient ∇f(u; D′) at u = w − a ∇f(w; D), where D′ is the current batch.

    D is the batch before it, so that both are independent and each is loaded once; a round's first batch is also its
    predecessor. Running statistics are those of the passes with w over D.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, rate: float, compute: Compute) -> None:
        self.model, self.loss, self.rate, self.compute = model, loss, rate, compute
        self.batches: list[Case] = []

    def lesson(self, inner: TrainStep) -> TrainStep:
        """A step on `objective` that records each batch."""

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
    model: nn.Module,
    objective: ObjectiveFunction,
    rate: float,
    epoch: Callable[[Sequence[TrainStep]], object],
    compute: Compute,
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
