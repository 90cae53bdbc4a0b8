"""The ensemble that the FedSM paper begins with (Xu et al. 2022, Sec. 3.1.1): all models answer for every image."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from medsilo.core.errors import PlanError
from medsilo.course.outcome import Outcome
from medsilo.deploy.super_model_outcome import SuperModelOutcome
from medsilo.learning.loop import LossFunction
from medsilo.methods.fedsm_extra import SelectorAfterwards
from medsilo.tasks.task import Task


class FedSMEnsemble(SelectorAfterwards):
    """h = Σ_k y_k h_k: the selector learns by what shares to mix the probabilities of all K + 1 models."""

    title = "FedSM ensemble"

    name: Literal["fedsm-ensemble"] = "fedsm-ensemble"

    @property
    def outcome(self) -> Outcome:
        return SuperModelOutcome("mixture", self.selector_network)

    def fits(self, task: Task) -> None:
        super().fits(task)
        if task.goal.outputs < 2 or task.goal.overlaps:
            other = "regions that overlap" if task.goal.overlaps else "one number"
            raise PlanError(
                f"algorithm.name: {self.name} mixes probabilities of classes, and networks of this task give {other}; "
                "choose fedsm"
            )

    def objective(self, scores: Tensor, outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
        return loss(mixed(scores, outputs), targets)


def mixed(scores: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """log Σ_k softmax(scores)_k softmax(outputs_k), of which a softmax gives h: [B, classes, ...]."""
    logarithms = torch.stack([output.log_softmax(1) for output in outputs])
    shares = scores.log_softmax(1).T
    return (logarithms + shares.reshape(*shares.shape, *(1,) * (logarithms.dim() - 2))).logsumexp(0)
