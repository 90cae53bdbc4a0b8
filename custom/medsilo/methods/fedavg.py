"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from medsilo.core.tensors import Modules, Tensors
from medsilo.course.algorithm import BY_ITSELF, Algorithm, without
from medsilo.course.declared import Private
from medsilo.course.group import Group
from medsilo.course.outcome import OneModel, Outcome, OwnModels
from medsilo.course.phase import Phase, learn
from medsilo.course.server_side import ServerSide
from medsilo.course.workbench import Workbench
from medsilo.learning.layers import batch_norm_buffer_names
from medsilo.learning.training import Training
from medsilo.mixing.mixers import Mixer, UniformMean, WeightedMean


class Averaging(Algorithm):
    """Methods whose server takes a mean over the sites."""

    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": BY_ITSELF}

    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="weight of a site in the average: by its number of training cases, or equal"
    )

    def mean(self, server: ServerSide) -> Mixer:
        """Return the mixer w ← Σ p_k w_k."""
        return WeightedMean() if self.weighting == "samples" else UniformMean()


class FedAvg(Averaging):
    """w ← Σ p_k w_k."""

    title = "FedAvg"
    paper = "McMahan et al. 2017"
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**BY_ITSELF, "algorithm.batch_norm_buffers": "average"}
    }

    name: Literal["fedavg"] = "fedavg"
    batch_norm_buffers: Literal["average", "local"] = Field(
        "average",
        description="running statistics of batch norm: averaged like weights, or kept at the site. Counters are never "
        "averaged; the first site's are taken",
    )

    @property
    def outcome(self) -> Outcome:
        return OneModel() if self.batch_norm_buffers == "average" else OwnModels()

    def phases(self, training: Training) -> Sequence[Phase]:
        return [Phase("train", training.rounds, (Group("model", self.travelling, self.mean),), self.work)]

    def private(self) -> Private:
        return Private(("model",))

    def travelling(self, modules: Modules) -> Tensors:
        """Return what of the model travels."""
        model = modules["model"]
        kept = batch_norm_buffer_names(model) if self.batch_norm_buffers == "local" else []
        return without(model.state_dict(), kept)

    def work(self, bench: Workbench) -> float:
        """Train plainly; other methods that average the whole model train in another way."""
        return learn(bench)
