"""ConDistFL (Wang et al., Conditional Distillation for Federated Learning from Partially Annotated Data, 2023)."""

import copy
from typing import Literal

from pydantic import Field
from torch import Tensor, nn, no_grad

from medsilo.extend import Task
from medsilo.extend.methods import FedAvg, PlanError, TrainContext, absent_in, labels_in, marks_in

SMALL = 1e-5
PLACES = 3  # minimum number of dimensions of a segmentation network's output


class ConDistFL(FedAvg):
    """FedAvg with distillation: from the received model, a site learns the structures U that the site did not annotate.

    At a position without annotation, the probability of structure u is p(u | not annotated) = p_u / (p_0 + Σ_U p_u).
    The loss is 1 − Dice between the probabilities of the site's model and of the received model, where the temperature
    τ sharpens all probabilities. The loss leaves out positions that the hospital annotated, and positions where the
    received model finds a structure that the hospital annotates. If a network has outputs at several resolutions, only
    the output at the highest resolution, which comes first, is distilled. With complete annotations, and in
    classification, the method equals FedAvg.
    """

    title = "ConDistFL"
    paper = "Wang et al. 2023"
    sends = "model"
    extra_work = "each batch passes through the received model once more, without training"
    suits = "segmentation in which hospitals annotated different structures"

    name: Literal["condistfl"] = "condistfl"  # type: ignore[assignment]
    weight: float = Field(1.0, ge=0, le=1000, description="weight of the distillation loss")
    temperature: float = Field(
        0.5, gt=0, le=100, description="τ: temperature that divides both models' scores in the distillation loss"
    )

    def check_task(self, task: Task) -> None:
        if task.goal.overlaps:
            raise PlanError(
                f"algorithm.name: {self.name} needs structures that do not overlap, and regions do; choose fedavg"
            )

    def train_round(self, context: TrainContext) -> float:
        arrived = copy.deepcopy(context.modules["model"]).requires_grad_(False).eval()

        def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            output = model(inputs)
            loss = context.loss(output, targets)
            largest = output if isinstance(output, Tensor) else output[0]
            if largest.ndim < PLACES or not any(marks_in(targets)):
                return loss
            with no_grad():
                # in evaluation mode, the received model returns only its output at the highest resolution
                taught = arrived(inputs)
            return loss + self.weight * distilled(largest, taught, targets, self.temperature)

        return context.train(context.train_step(objective=objective))


def distilled(output: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the distillation loss for the structures without annotation, averaged over cases and structures. The shape
    of both outputs is [cases, labels, *grid].
    """
    total, labels = output.new_zeros(()), labels_in(targets)
    for case, mark in enumerate(marks_in(targets)):
        if not (absent := absent_in(mark)):
            continue
        not_drawn = [0, *absent]
        found = taught[case].argmax(0)
        counts = (labels[case] == 0) & sum((found == label) for label in not_drawn).bool()  # type: ignore[union-attr]
        own, right = ((one[case, not_drawn] / temperature).softmax(0)[1:] * counts for one in (output, taught))
        both, each = ((own * right).flatten(1).sum(1), (own + right).flatten(1).sum(1))
        total = total + (1 - (2 * both + SMALL) / (each + SMALL)).mean()
    return total / len(output)
