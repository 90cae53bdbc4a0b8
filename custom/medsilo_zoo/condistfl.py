"""ConDistFL: Wang et al., Conditional Distillation for Federated Learning from Partially Annotated Data, 2023."""

import copy
from typing import Literal

from pydantic import Field
from torch import Tensor, nn, no_grad

from medsilo.extend import Task
from medsilo.extend.methods import FedAvg, PlanError, TrainContext, absent_in, labels_in, marks_in

SMALL = 1e-5
PLACES = 3  # axes of an output that has places


class ConDistFL(FedAvg):
    """FedAvg that learns structures which a hospital did not draw from the model as it arrived.

    Where the hospital drew nothing, background or one of the undrawn U, p(u | not drawn) = p_u / (p_0 + Σ_U p_u). The
    loss of these is 1 − Dice between both models', p of the one that arrived being as sure as τ makes it. It leaves out
    places where the hospital drew something, or the one that arrived finds something that it did draw. Of outputs of
    several sizes the largest, which comes first, is distilled. Where all was drawn, and of cases with a class, it is
    FedAvg.
    """

    title = "ConDistFL"
    paper = "Wang et al. 2023"

    name: Literal["condistfl"] = "condistfl"  # type: ignore[assignment]
    weight: float = Field(1.0, ge=0, le=1000, description="weight of the distillation")
    temperature: float = Field(0.5, gt=0, le=100, description="τ of both models' scores in it")

    def check_task(self, task: Task) -> None:
        if task.goal.overlaps:
            raise PlanError(
                f"algorithm.name: {self.name} needs structures that do not overlap, and regions do; choose fedavg"
            )

    def work(self, bench: TrainContext) -> float:
        arrived = copy.deepcopy(bench.modules["model"]).requires_grad_(False).eval()

        def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            output = model(inputs)
            loss = bench.loss(output, targets)
            largest = output if isinstance(output, Tensor) else output[0]
            if largest.ndim < PLACES or not any(marks_in(targets)):
                return loss
            with no_grad():
                taught = arrived(inputs)  # of a model that is not training, the largest alone
            return loss + self.weight * distilled(largest, taught, targets, self.temperature)

        return bench.train(bench.lesson(objective=objective))


def distilled(output: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the loss of undrawn structures, the mean over cases and these; outputs [cases, labels, *grid]."""
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
