"""Define the objects that a method uses for training at a site."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Modules
from medsilo.learning.compute import Compute, LossFunction
from medsilo.learning.loop import ObjectiveFunction, OutputLoss, Step, TrainStep, plain_step, train_step
from medsilo.learning.training import Training

if TYPE_CHECKING:  # these imports are late, because only differential privacy needs them
    from medsilo.learning.private import PrivateSteps


class TrainingCases(Protocol):
    @property
    def steps(self) -> int:
        """The number of mini-batches in one epoch."""

    def epoch(self, train_steps: Sequence[TrainStep], number: int, most: int | None = None) -> float:
        """Apply each training step to each mini-batch of one epoch, and return the mean of the losses that the first
        training step computes.

        Args:
            train_steps: the training steps, which are applied in this order
            most: the largest number of mini-batches, or None for the whole epoch
        """

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches that contain each training case once, in the data set's order."""

    def count(self) -> int:
        """Return the number of training cases that the site discloses; the number is exact or rounded."""

    def labels(self) -> Sequence[int]:
        """Return the exact number of training cases in each class."""

    def told_loss(self, model: nn.Module) -> float | None:
        """Return a model's mean loss on the training cases in the form that the site discloses: exact or rounded.

        The training loss is computed without dropout; the method returns None if the hospital suppresses the loss.
        """

    def told_score(self, model: nn.Module) -> float | None:
        """Return a model's validation score in the form that the site discloses: exact or rounded, or None if the
        hospital suppresses the score.
        """


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """The networks, optimizers and data with which a method trains at a site in one round."""

    site: str
    sites: Sequence[str]
    modules: Modules
    optimizers: Mapping[str, Optimizer]
    training: Training
    loss: LossFunction  # the task's loss, with the plan's class weights
    compute: Compute
    cases: TrainingCases
    random: Generator  # generator of this site's random numbers in this round
    # A function that creates the kind of training step that the plan names; None for the plain training step.
    rule: Callable[[nn.Module, Optimizer], Step] | None = None
    # An object that creates noisy training steps; None if the study has no differential privacy.
    private: "PrivateSteps | None" = None

    def train_step(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        """Return a training step for one network.

        Args:
            name: the network's name
            objective: computes the loss; by default, the task's loss
            step: changes the weights; by default, the plan's kind of step
        """
        model, optimizer = self.modules[name], self.optimizers[name]
        if step is None:
            step = self.rule(model, optimizer) if self.rule else plain_step
        objective = objective or OutputLoss(self.loss)
        if self.private is None:
            return train_step(model, objective, optimizer, self.compute, step)
        if name in self.private.exact_networks:
            return self.private.unless_empty(train_step(model, objective, optimizer, self.compute, step))
        if not isinstance(objective, OutputLoss):
            raise MedsiloError(
                f"privacy: {name} learns from more than a loss of its output, which needs noise of its own"
            )
        return self.private.train_step(model, objective.loss, optimizer, step)

    def train(self, *train_steps: TrainStep, share: float = 1.0) -> float:
        """Train for one round, and return the mean of the losses that the first training step computes in the last
        epoch.

        Args:
            train_steps: the training steps, which are all applied to a mini-batch before the next mini-batch is loaded;
                by default, one step trains the network "model"
            share: the fraction of the round's mini-batches that are used
        """
        train_steps = train_steps or (self.train_step(),)
        steps = self.cases.steps
        most = max(1, math.ceil(share * self.training.steps_of_round(steps)))
        epochs = enumerate(range(0, most, steps))
        return [self.cases.epoch(train_steps, number, most - done) for number, done in epochs][-1]
