"""FedSM-extra and the FedSM ensemble (Xu et al. 2022, Section 3.1), which train the selector after all other models."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import PlanError
from medsilo.deploy.super_model_outcome import SuperModelOutcome
from medsilo.learning.compute import LossFunction
from medsilo.methods.fedsm import ModelsAndSelector, experts
from medsilo.schedule.outcome import Outcome
from medsilo.schedule.phase import Phase
from medsilo.schedule.train_context import TrainContext
from medsilo.tasks.task import Task


class SelectorAfterwards(ModelsAndSelector):
    """The base of FedSM-extra and the FedSM ensemble: FedSM's rounds train global and personal models, and later rounds
    train the selector.

    Before the rounds that train the selector, each hospital receives the personal models of all hospitals that agreed
    to share models. The selector has K + 1 outputs, and output 0 belongs to the global model.
    """

    protocols = {"paper": ModelsAndSelector.literal}
    bytes_sent = "on average, 2.5 times FedAvg's bytes"
    extra_work = "in the selector's rounds, each batch passes through all K + 1 models"

    selector_rounds: int | None = Field(
        None,
        ge=1,
        description="how many of the last rounds train the selector; `null` means a third of `training.rounds`, as in "
        "the paper",
    )

    def phases(self, rounds: int) -> Sequence[Phase]:
        last = self.selector_rounds or max(1, rounds // 3)
        if last >= rounds:
            raise PlanError(
                f"training.rounds: {self.name} trains models before {last} rounds of the selector; set more rounds"
            )
        models = (self.global_group(), self.personal_group())
        done = (*(group.given_only() for group in models), experts())
        return [
            Phase("train", rounds - last, models, self.train_models),
            Phase("select", last, (*done, *self.selector_groups()), self.train_selector),
        ]

    def train_models(self, context: TrainContext) -> float:
        return context.train(context.train_step("model"), context.train_step("global"))

    def train_selector(self, context: TrainContext) -> float:
        """Train the selector on the outputs of all K + 1 models."""
        frozen = [context.modules["global"], *context.modules["experts"].children()]
        for model in frozen:
            model.eval()

        def objective(selector: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad():
                outputs = [model(inputs) for model in frozen]
            return self.objective(selector(inputs), outputs, targets, context.loss)

        with self.learning_selector(context, objective) as selector:
            return context.train(selector)

    @abstractmethod
    def objective(self, scores: Tensor, outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
        """Return the selector's loss on a batch, computed from the outputs of the selector and of the K + 1 models."""


class FedSMExtra(SelectorAfterwards):
    """FedSM in which the selector learns which of the K + 1 models is best for an image, and the best model
    predicts.
    """

    title = "FedSM-extra"
    sends = (
        "global model, personal model, selector; in later rounds, only the selector; hospitals that agreed receive "
        "each other's personal models"
    )
    suits = "hospitals that differ from each other; FedSM-extra is an ablation in the FedSM paper"

    name: Literal["fedsm-extra"] = "fedsm-extra"

    @property
    def outcome(self) -> Outcome:
        return SuperModelOutcome("argmax", self.selector_network)

    def objective(self, scores: Tensor, outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
        return functional.cross_entropy(scores, best_of(outputs, targets, loss))


def best_of(outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
    """Return the index of the model with the lowest loss for every case of a batch, [B].

    The index is argmin_k L(h_k(x), y), which corrects a misprint in Equation 1. If several models have equally low
    losses, the function returns the smallest index among these models.
    """
    losses = [[loss(output[i : i + 1], targets[i : i + 1]) for i in range(len(targets))] for output in outputs]
    return torch.stack([torch.stack(row) for row in losses]).argmin(0)


class FedSMEnsemble(SelectorAfterwards):
    """FedSM in which the selector learns weights y_k for the probabilities of all K + 1 models, and the prediction is h
    = Σ_k y_k h_k.
    """

    title = "FedSM ensemble"
    sends = "global model, personal model, selector; in the rounds in which FedSM-extra sends these networks"
    suits = "hospitals that differ from each other; FedSM-ensemble is an ablation in the FedSM paper"

    name: Literal["fedsm-ensemble"] = "fedsm-ensemble"

    @property
    def outcome(self) -> Outcome:
        return SuperModelOutcome("mixture", self.selector_network)

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if task.goal.outputs < 2 or task.goal.overlaps:
            other = "regions that overlap" if task.goal.overlaps else "one number"
            raise PlanError(
                f"algorithm.name: {self.name} mixes class probabilities, but networks of this task predict {other}; "
                "choose fedsm"
            )

    def objective(self, scores: Tensor, outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
        return loss(mixed(scores, outputs), targets)


def mixed(scores: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Return log Σ_k softmax(scores)_k softmax(outputs_k), [B, classes, ...], whose softmax is the mixed
    prediction h.
    """
    logarithms = torch.stack([output.log_softmax(1) for output in outputs])
    shares = scores.log_softmax(1).T
    return (logarithms + shares.reshape(*shares.shape, *(1,) * (logarithms.dim() - 2))).logsumexp(0)
