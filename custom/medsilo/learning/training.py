"""Define the plan's section `training`: rounds, batch size, optimizer, and the schedule of the learning rate."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from medsilo.core.section import Feature

if TYPE_CHECKING:
    from torch import nn, optim

POWER = 0.9  # exponent of nnU-Net's learning rate schedule
MOST_EPOCHS = 100_000  # largest number of training epochs in a study, at each site
Beta = Annotated[float, Field(ge=0, lt=1)]
ClassWeights = Annotated[tuple[Annotated[float, Field(gt=0, le=1000)], ...], Field(min_length=2, max_length=4096)]


class Training(Feature):
    """The plan's section `training`, which is the same at every site.

    >>> Training(rounds=3, learning_rate=0.001).batch_size
    16
    """

    rounds: int = Field(10, ge=1, le=10_000, description="rounds of the study")
    local_epochs: int = Field(
        1, ge=1, le=1000, description="number of passes over a site's training data in each round"
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="number of mini-batches that every site trains on in each round; if this key is set, "
        "`local_epochs` has no effect. Each round starts a new pass over the data. `null`: whole passes",
    )
    batch_size: int = Field(
        16,
        ge=1,
        le=65_536,
        description="cases per optimizer step; a last batch with a single case is left out, because batch norm can't "
        "use it",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd",
        description="the optimizer at the sites. If `--set` changes the optimizer, medsilo drops the settings that "
        "the plan gives for the old optimizer, except for settings that `--set` also gives. After a "
        "change of the optimizer, the default of `learning_rate` is 0.01 for `sgd`, else 0.001, and the "
        "default of `weight_decay` is 0.01 for `adamw`, else 0",
    )
    learning_rate: float = Field(0.01, ge=1e-8, le=1000, description="learning rate of the optimizer")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of `sgd`")
    nesterov: bool = Field(False, description="whether `momentum` is Nesterov's")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay rates of `adam` and `adamw`")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1,
        description="weight decay; `sgd` and `adam` add it to the gradient, and `adamw` subtracts it from the "
        "weights directly (decoupled)",
    )
    schedule: Literal["constant", "poly", "cosine"] = Field(
        "constant",
        description="`poly` multiplies the learning rate of round r of R by `(1 − (r − 1) / R)^0.9`, as nnU-Net does "
        "for epochs. `cosine` multiplies the learning rate of round r by `(1 + cos(π (r − 1) / R)) / 2`. "
        "`poly` and `cosine` count rounds from the first round after the warm-up",
    )
    warmup: int = Field(
        0,
        ge=0,
        le=10_000,
        # a plan without a warm-up omits the key, so that the plan has the same hash as before the key was introduced
        exclude_if=lambda rounds: rounds == 0,
        description="number of warm-up rounds, W: in warm-up round r the learning rate is multiplied by r / (W + 1)",
    )
    clip: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="the greatest norm of a mini-batch's gradient over all of a network's weights, before a method "
        "corrects the gradient. A gradient with a larger norm is scaled down. `null`: any norm",
    )
    truncate: bool = Field(
        False,
        description="whether every site trains on as many cases as the smallest site has, as in HarmoFL's released "
        "code; the seed selects the cases",
    )
    class_weights: Literal["none", "balanced"] | ClassWeights = Field(
        "none",
        description="weight of each class in the training loss, a cross entropy averaged over cases; scores use no "
        "class weights. `balanced`: each site computes the weight N / (K · n) from its N training cases "
        "or voxels, of which n have the class. K is the number of classes. The site discloses none of these "
        "numbers. A list "
        "has one number for each class; for masks, the first number is for the background",
    )
    optimizer_state: Literal["keep", "reset"] = Field(
        "keep",
        description="treatment of the optimizer's momentum at a site when a round begins with new weights: `keep` "
        "the momentum, or `reset` the momentum to zero",
    )

    @model_validator(mode="after")
    def _numbers_that_do_nothing(self) -> Self:
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(
                f"momentum belongs to sgd; {self.optimizer} has betas: remove momentum or choose optimizer=sgd"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is a kind of momentum; set momentum, or nesterov=false")
        if self.optimizer == "sgd" and "betas" in self.model_fields_set and self.betas != (0.9, 0.999):
            raise ValueError("betas belong to adam; sgd has momentum: remove betas or choose optimizer=adam")
        if self.warmup >= self.rounds:
            raise ValueError(
                f"warmup: {self.warmup} warm-up rounds leave none of {self.rounds} rounds to train; lower warmup"
            )
        if self.rounds * self.local_epochs > MOST_EPOCHS:
            raise ValueError(f"rounds times local_epochs is over {MOST_EPOCHS} passes over the data; lower one of them")
        return self

    def conflicts(self, plan: Any, networks: Any) -> Iterable[str]:
        weights, task = self.class_weights, plan.task
        if weights == "none":
            return
        if not task.goal.cross_entropy:
            yield (
                f"training.class_weights: the loss of task {task.name} has no cross entropy over classes, which they "
                "would change; set none"
            )
        elif isinstance(weights, tuple) and len(weights) != task.goal.classes:
            yield (
                f"training.class_weights: {len(weights)} numbers, but task {task.name} has {task.goal.classes} "
                "classes; give one for each (of masks: the background first)"
            )

    def steps_of_round(self, in_epoch: int) -> int:
        return self.local_steps or self.local_epochs * in_epoch

    def make_optimizer(self, parameters: "Iterable[nn.Parameter]") -> "optim.Optimizer":
        from medsilo.learning.optimizers import optimizer_of

        return optimizer_of(self, parameters)

    @property
    def paced(self) -> bool:
        return self.schedule != "constant"

    def pace(self, number: int, rounds: int) -> float:
        """Return the factor by which the schedule multiplies the learning rate in a round.

        Args:
            number: index of the round, from 1
            rounds: number of rounds of the study
        """
        if number <= self.warmup:
            return number / (self.warmup + 1)
        gone, all_of_them = number - 1 - self.warmup, rounds - self.warmup
        if self.schedule == "poly":
            return (1 - gone / all_of_them) ** POWER
        return (1 + math.cos(math.pi * gone / all_of_them)) / 2 if self.schedule == "cosine" else 1.0
