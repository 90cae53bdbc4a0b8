"""Models of several studies that answer together: the mean of what each of them says.

Krogh and Vedelsby, Neural Network Ensembles, Cross Validation, and Active Learning, NeurIPS 1994: no mean of several
models has a larger squared error than these have on average, and it is smaller by how far they differ.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.deploy.source import Source
from medsilo.tasks.task import Task

MOST = 16  # members


class Committee(nn.Module):
    """The mean of its members' probabilities as scores, so that a softmax or a logistic function gives it back.

    Of numbers that are no probabilities, as a regression has them, it is their mean.
    """

    def __init__(self, task: Task, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not task.goal.by_case:
            raise MedsiloError("risks of two models can't be compared, so that they don't answer together; choose one")
        self.members = nn.ModuleList(members)
        self.chooses = task.goal.outputs > 1 and not task.goal.overlaps
        self.decides = not self.chooses and task.goal.classes > 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = torch.stack([member(inputs) for member in self.members])
        if self.chooses:
            return _log_mean(outputs.log_softmax(2))
        if self.decides:
            sigmoid = nn.functional.logsigmoid
            return _log_mean(sigmoid(outputs)) - _log_mean(sigmoid(-outputs))
        return outputs.mean(0)


def _log_mean(logarithms: Tensor) -> Tensor:
    return torch.logsumexp(logarithms, 0) - math.log(len(logarithms))


def answering_together(sources: Sequence[Source]) -> Source:
    """Return one source of several, whose models have learned the same task; one alone is returned as it is."""
    first, *others = sources
    if not others:
        return first
    if len(sources) > MOST:
        raise MedsiloError(f"{len(sources)} models are to answer together; give {MOST} at most")
    task, *tasks = (source.plan.task for source in sources)
    if any(other != task for other in tasks):
        raise MedsiloError("these models were trained for different tasks; give models of one task, with equal keys")
    committee = Committee(task, [source.network for source in sources]).eval()
    facts = {"kind": "committee", "members": [source.facts for source in sources]}
    plan = first.plan.model_copy(update={"layers": ()})  # what layers say was found of one model
    return Source(committee, plan, facts, first.run)
