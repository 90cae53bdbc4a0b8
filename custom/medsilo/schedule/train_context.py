"""Define the objects with which a method trains at a site."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Modules
from medsilo.learning.compute import Compute, LossFunction
from medsilo.learning.loop import ObjectiveFunction, OutputLoss, Step, TrainStep, lesson, plain_step
from medsilo.learning.training import Training

if TYPE_CHECKING:  # needed only with differential privacy
    from medsilo.learning.private import PrivateSteps


class TrainingCases(Protocol):
    """A site's training cases in one round."""

    @property
    def steps(self) -> int:
        """The number of mini-batches in an epoch."""

    def epoch(self, lessons: Sequence[TrainStep], number: int, most: int | None = None) -> float:
        """Train on one epoch's mini-batches by these steps, and return the first step's mean loss.

        most: the largest number of mini-batches.
        """

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each training case once, in batches, in the data set's order."""

    def count(self) -> int:
        """Return the number of training cases in the form that the site discloses."""

    def labels(self) -> Sequence[int]:
        """Return the number of training cases of each class."""

    def told_loss(self, model: nn.Module) -> float | None:
        """Return a model's rounded mean training loss, without dropout, for sending; None if the hospital suppresses
        it."""

    def told_score(self, model: nn.Module) -> float | None:
        """Return a model's rounded validation score for sending; None if the hospital suppresses it."""


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """The networks, optimizers and data with which a method trains at a site in one round."""

    site: str
    sites: Sequence[str]  # the training sites, sorted
    modules: Modules
    optimizers: Mapping[str, Optimizer]
    training: Training
    loss: LossFunction  # the task's loss, with the plan's class weights
    compute: Compute
    cases: TrainingCases
    random: Generator  # this site's random numbers in this round
    # makes the plan's kind of training step, unless it is the plain step
    rule: Callable[[nn.Module, Optimizer], Step] | None = None
    # makes noisy training steps, with differential privacy
    private: "PrivateSteps | None" = None

    def lesson(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        """Return a training step of one network, by default with the task's loss and the plan's kind of step."""
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
        """Train for the plan's local epochs, by default the "model" only; all steps use each batch before the next is
        loaded.

        Returns the first step's mean loss in the last epoch. share: the fraction of the round's mini-batches to train
        on.
        """
        lessons = lessons or (self.lesson(),)
        steps = self.cases.steps
        most = max(1, math.ceil(share * self.training.steps_of_round(steps)))
        epochs = enumerate(range(0, most, steps))
        return [self.cases.epoch(lessons, number, most - done) for number, done in epochs][-1]
