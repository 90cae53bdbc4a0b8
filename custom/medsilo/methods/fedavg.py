"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from medsilo.learning.layers import batch_norm_buffer_names
from medsilo.methods.base import Algorithm, Groups, Modules, without
from medsilo.mixing.mixers import Mixer, UniformMean, WeightedMean


class Averaging(Algorithm):
    """Methods whose server takes a mean over the sites."""

    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="weight of a site in the average: by its number of training cases, or equal"
    )

    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        return WeightedMean() if self.weighting == "samples" else UniformMean()


class FedAvg(Averaging):
    """w ← Σ p_k w_k."""

    title = "FedAvg"
    paper = "McMahan et al. 2017"
    travels = "model"

    name: Literal["fedavg"] = "fedavg"
    batch_norm_buffers: Literal["average", "local"] = Field(
        "average",
        description="running statistics of batch norm: averaged like weights, or kept at the site. Counters are never "
        "averaged; the first site's are taken",
    )

    def shared(self, modules: Modules, phase: str) -> Groups:
        model = modules["model"]
        kept = batch_norm_buffer_names(model) if self.batch_norm_buffers == "local" else []
        return {"model": without(model.state_dict(), kept)}
