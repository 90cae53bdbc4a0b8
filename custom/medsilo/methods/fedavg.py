"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from medsilo.course.algorithm import BY_ITSELF, Algorithm
from medsilo.course.declared import Private
from medsilo.course.group import Group, network
from medsilo.course.phase import Phase, learn
from medsilo.course.server_side import ServerSide
from medsilo.course.workbench import Workbench
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
    name: Literal["fedavg"] = "fedavg"

    def phases(self, training: Training) -> Sequence[Phase]:
        return [Phase("train", training.rounds, (Group("model", network("model"), self.mean),), self.work)]

    def private(self) -> Private:
        return Private(("model",))

    def work(self, bench: Workbench) -> float:
        """Train plainly; other methods that average the whole model train in another way."""
        return learn(bench)
