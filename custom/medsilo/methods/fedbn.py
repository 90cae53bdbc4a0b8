"""FedBN: Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, 2021."""

from collections.abc import Sequence
from typing import Literal

from medsilo.core.tensors import Modules, Tensors
from medsilo.course.algorithm import require, without
from medsilo.course.group import Group
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Phase
from medsilo.course.private import Private
from medsilo.learning.layers import norm_names
from medsilo.learning.training import Training
from medsilo.methods.fedavg import Averaging


class FedBN(Averaging):
    """FedAvg of everything but batch norm, whose weights and statistics stay at the site.

    Of a network without batch norm, the weights of its group or instance norms stay.
    """

    title = "FedBN"
    paper = "Li et al. 2021"

    name: Literal["fedbn"] = "fedbn"

    @property
    def outcome(self) -> Outcome:
        return OwnModels()

    def phases(self, training: Training) -> Sequence[Phase]:
        rest = Group("model", all_but_norms, self.mean, title="model without batch norm")
        return [Phase("train", training.rounds, (rest,))]

    def check(self, modules: Modules) -> None:
        require(norm_names(modules["model"]), self.name, "batch norm", "set network.norm=batch or choose fedavg")

    def private(self) -> Private:
        says = "the norms learn by noisy steps, too, although they stay: all other gradients depend on them"
        return Private(("model",), says=says)


def all_but_norms(modules: Modules) -> Tensors:
    """Return the model's tensors without those of its norms."""
    model = modules["model"]
    return without(model.state_dict(), norm_names(model))
