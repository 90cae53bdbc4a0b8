"""What the three AdaFeds share: statistics of the sites, a mixture for every site, batch norm at home."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import Refused
from medsilo.learning.layers import batch_norm_names
from medsilo.learning.statistics import (
    Layers,
    Measured,
    Statistics,
    input_channels,
    measured_layers,
    statistics_of,
    with_noise,
)
from medsilo.methods.base import Algorithm, Groups, Modules, Workbench, without
from medsilo.mixing.mixers import Identity, Mixer, SimilarityMix, UniformMean
from medsilo.mixing.similarity import mixing_weights, uniform_weights, wasserstein_distances

LARGEST = 1e30  # of a statistic: far beyond any that is meant seriously, and its square is still a number


class Similar(Algorithm):
    """ψ_i ← Σ_j w_ij ψ_j with W from the sites' statistics; φ_i, the batch norm, stays (Eqs. 2 to 8)."""

    paper = "Chen et al. 2022"
    layers: ClassVar[Layers] = "all"  # whose statistics are measured

    self_weight: float = Field(0.5, ge=0, le=1, description="λ of Eq. 8: a site's own weight in its mixture")
    weights: Literal["similarity", "uniform"] = Field(
        "similarity", description="`uniform` is the control: the same λ, and equal weights for all other sites"
    )
    refresh: int | None = Field(
        None,
        ge=1,
        description="measure the sites again after so many weighted rounds, with each site's own model; `null`: never",
    )
    bn_share: Literal["local", "weighted", "mean"] = Field(
        "local",
        description="batch norm stays at the site, is mixed by W like other weights, or is averaged over all sites",
    )
    absent: Literal["leave-out", "last"] = Field(
        "leave-out",
        description="if a site misses a round: leave it out of the others' average, or use its last contribution",
    )
    noise: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="standard deviation of Gaussian noise on each statistic; this is not differential privacy "
        "([adafed.md](adafed.md))",
    )

    def networks(self, build: Any) -> Modules:
        model = build()
        self.check({"model": model})  # else a network without these layers would fail below, in other words
        channels = [input_channels(layer) for layer in measured_layers(model, self.layers)]
        return {"model": model, "statistics": Measured(channels)}

    def personal(self, modules: Modules, phase: str) -> bool:
        return True

    @property
    def measures(self) -> bool:
        """Whether W needs statistics."""
        return True

    # What is shared
    def trained(self, modules: Modules) -> Groups:
        """What is mixed after a round of training."""
        model = modules["model"]
        norms, everything = batch_norm_names(model), model.state_dict()
        if self.bn_share == "weighted" or not norms:
            return {"model": everything}
        rest = {"model": without(everything, norms)}
        return rest if self.bn_share == "local" else rest | {"batch-norm": {name: everything[name] for name in norms}}

    def examine(self, groups: Groups, phase: str) -> None:
        tensors = groups.get("statistics", {})
        for name, tensor in tensors.items():
            if name == "samples" and tensor < 1:
                raise Refused("statistics/samples is below 1; nothing was measured")
            if tensor.numel() and (tensor.abs().max() > LARGEST or (name.endswith("variance") and tensor.min() < 0)):
                raise Refused(f"statistics/{name} holds numbers that no statistics can have")

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        if group == "statistics":
            return Identity()
        return UniformMean() if group != "model" else SimilarityMix(self.matrix(earlier, sites), self.absent)

    def matrix(self, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Tensor:
        """W. Uniform rows while nothing was measured; a site that was not keeps its own and counts for nobody else."""
        statistics = measured_by(earlier, sites)
        if self.measures and not statistics:
            return uniform_weights(len(sites))
        if self.weights == "uniform":
            return uniform_weights(len(sites), self.self_weight)
        weights = torch.eye(len(sites), dtype=torch.float64)
        here = torch.tensor([place for place, site in enumerate(sites) if site in statistics])
        distances = wasserstein_distances([statistics[site] for site in sites if site in statistics])
        weights[here[:, None], here] = mixing_weights(distances, self.self_weight)
        return weights

    def found(self, mixers: Mapping[str, Mixer], sites: Sequence[str]) -> dict[str, Any]:
        mixer = mixers.get("model")
        if not isinstance(mixer, SimilarityMix):
            return {}
        return {"similarity": {"sites": list(sites), "weights": mixer.weights.tolist(), "noise": self.noise}}

    # What is measured
    def measure(self, bench: Workbench, statistics: Statistics) -> None:
        """Put the statistics where they are sent from."""
        if self.noise:
            secret = torch.Generator()
            secret.seed()  # from the machine, not from the plan: the server knows the plan's seed
            statistics = with_noise(statistics, self.noise, secret)
        holder = bench.modules["statistics"]
        assert isinstance(holder, Measured)
        holder.take(statistics, bench.samples)

    def leaves(self, modules: Modules) -> list[str]:
        holder = modules["statistics"]
        assert isinstance(holder, Measured)
        numbers = sum(tensor.numel() for name, tensor in holder.state_dict().items() if name != "samples")
        when = "once" if self.refresh is None else f"after every {self.refresh} weighted rounds"
        noise = (
            f"Gaussian noise of standard deviation {self.noise} is added to each; it is no differential privacy"
            if self.noise
            else "no noise is added"
        )
        return [
            f"statistics: mean and variance of {holder.layers} layers' inputs over all training cases, {numbers} "
            f"numbers, {when}; {noise}",
            "statistics: means over few cases come close to single cases' features; with one case they are its own",
            "statistics: how similar two sites' data are shows in the mixing weights that the summary holds",
        ]


def measured_by(earlier: Mapping[str, Mixer], sites: Sequence[str]) -> dict[str, Statistics]:
    """The statistics of the sites that have sent theirs."""
    if "statistics" not in earlier:
        return {}
    rows = {site: earlier["statistics"].current(site) for site in sites}
    return {site: statistics_of(row) for site, row in rows.items() if row["samples"] > 0}
