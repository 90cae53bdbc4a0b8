"""FedBN: Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, 2021."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from medsilo.core.tensors import Modules
from medsilo.course.algorithm import require
from medsilo.course.declared import Private
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Group, network
from medsilo.learning.layers import batch_norm_names, norm_names
from medsilo.methods.fedavg import Averaging


class FedBN(Averaging):
    """FedAvg of everything but batch norm, whose weights and statistics stay at the site."""

    title = "FedBN"
    paper = "Li et al. 2021"
    outcome: ClassVar[Outcome] = OwnModels()

    name: Literal["fedbn"] = "fedbn"
    keeps: Literal["batch-norm", "norms"] = Field(
        "batch-norm",
        description="what stays at the site: batch norm, or norms of any kind. A plan with `privacy` has no batch norm",
    )

    def groups(self) -> tuple[Group, ...]:
        title = "model without batch norm" if self.keeps == "batch-norm" else "model without norms"
        return (Group("model", network("model", but=self.kept), self.mean, title=title),)

    def check(self, modules: Modules) -> None:
        remedy = "set network.norm=batch or choose fedavg"
        if self.keeps == "batch-norm":
            remedy += "; to keep group or instance norms at the sites, set algorithm.keeps=norms"
        require(self.kept(modules["model"]), self.name, self.keeps.replace("-", " "), remedy)

    def kept(self, model: nn.Module) -> list[str]:
        """Return the names of the norms' tensors."""
        return batch_norm_names(model) if self.keeps == "batch-norm" else norm_names(model)

    def private(self) -> Private:
        says = "the norms learn by noisy steps, too, although they stay: all other gradients depend on them"
        return Private(("model",), says=says)
