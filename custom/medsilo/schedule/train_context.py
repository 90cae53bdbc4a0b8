"""A method's tools at a site that trains."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Modules
from medsilo.learning.compute import Compute, LossFunction
from medsilo.learning.loop import ObjectiveFunction, OutputLoss, Step, TrainStep, lesson, plain_step
from medsilo.learning.training import Training

if TYPE_CHECKING:  # only under a promise of privacy
    from medsilo.learning.private import PrivateSteps


@dataclass(frozen=True)
class TrainContext:
    """A method's tools when a site trains: the networks, their optimizers, and passes over the data."""

    site: str
    sites: Sequence[str]  # all that train, in sorted order
    modules: Modules
    optimizers: Mapping[str, Optimizer]
    training: Training
    loss: LossFunction  # the task's
    compute: Compute
    epoch: Callable[..., float]  # (lessons, number of the epoch, most batches) -> mean loss of the first
    data: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # the training data once, in their order
    samples: Callable[[], int]  # the training cases, as their number may leave
    steps: int  # mini-batches in an epoch
    random: Generator  # for what a method draws at this site in this round
    rule: Callable[[nn.Module, Optimizer], Step] | None  # the plan's for a network's step, where it is not plain
    private: "PrivateSteps | None" = None  # how networks learn, where the plan promises privacy
    labels: Callable[[], Sequence[int]] = tuple  # how often each label occurs among all training cases
    # Numbers that a method sends beside tensors, as the hospital lets them leave; None where it does not.
    told_loss: Callable[[nn.Module], float | None] = lambda model: None  # over the training cases, without dropout
    told_score: Callable[[nn.Module], float | None] = lambda model: None  # over the validation cases

    def lesson(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        """Return how one network learns from a batch; by default the task, by the plan's step."""
        model, optimizer = self.modules[name], self.optimizers[name]
        if step is None:
            step = self.rule(model, optimizer) if self.rule else plain_step
        objective = objective or OutputLoss(self.loss)
        if self.private is None:
            return lesson(model, objective, optimizer, self.compute, step)
        if name in self.private.exact_networks:
            return self.private.unless_empty(lesson(model, objective, optimizer, self.compute, step))
        if not isinstance(objective, OutputLoss):
            raise MedsiloError(
                f"privacy: {name} learns from more than a loss of its output, which needs noise of its own"
            )
        return self.private.lesson(model, objective.loss, optimizer, step)

    def train(self, *lessons: TrainStep, share: float = 1.0) -> float:
        """Do the plan's local epochs, by default on "model" alone: each batch is loaded once and serves every lesson.

        Returns the first lesson's mean loss in the last epoch. share: of all its mini-batches, only the first.
        """
        lessons = lessons or (self.lesson(),)
        most = max(1, math.ceil(share * self.training.steps_of_round(self.steps)))
        epochs = enumerate(range(0, most, self.steps))
        return [self.epoch(lessons, number, most - done) for number, done in epochs][-1]
