"""AdaFed: Chen et al., Personalized Federated Learning with Adaptive Batchnorm for Healthcare (FedAP), 2022."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.errors import PlanError, Refused
from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.layers import head_names, local_norm_names
from medsilo.learning.statistics import (
    Layers,
    Statistics,
    StatisticsHolder,
    batch_norm_input_statistics,
    input_channels,
    measured_layers,
    moments_of_cases,
    statistics_from,
    statistics_of,
)
from medsilo.methods.bases import require, require_features
from medsilo.methods.pretraining import Pretraining
from medsilo.mixing.aggregators import Aggregator, ComparedOnly, SimilarityMix
from medsilo.schedule.algorithm import BY_ITSELF, Algorithm
from medsilo.schedule.declared import Private
from medsilo.schedule.phase import FURTHEST, Facts, Group, ModelFactory, Phase, Ranges, ServerSide, network, site_mean
from medsilo.schedule.train_context import TrainContext
from medsilo.tasks.task import Task


def wasserstein_distances(statistics: Sequence[Statistics]) -> Tensor:
    """Return the matrix [N, N] of distances between the feature statistics of N sites (Equations 5 and 6).

    The distance is d_ij = Σ_l sqrt(‖μ_i^l − μ_j^l‖² + ‖√r_i^l − √r_j^l‖²), where each term is the 2-Wasserstein
    distance of two Gaussian distributions with diagonal covariance.

    Args:
        statistics: for each site, the (mean μ, variance r) of the same layers
    """
    distances = torch.zeros(len(statistics), len(statistics), dtype=torch.float64)
    for layer in zip(*statistics, strict=True):
        means = torch.stack([mean.detach().cpu().double() for mean, _ in layer])
        variances = torch.stack([variance.detach().cpu().double() for _, variance in layer])
        points = torch.cat([means, variances.sqrt()], dim=1)
        # a small distance computed from matrix products would be imprecise, and small distances have the largest
        # weights
        distances += torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distances


def mixing_weights(distances: Tensor, self_weight: float) -> Tensor:
    """Return the mixing weights W of Equations 7 and 8, [N, N].

    The weight w_ii is λ; for the sites j ≠ i, the weights w_ij are proportional to 1 / d_ij and sum to 1 − λ. If some
    sites have distance zero from site i, all sites at a greater distance get the weight 0. For a single site, W =
    [[1]].
    """
    distances = distances.detach().to("cpu", torch.float64)
    if len(distances) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    others = ~torch.eye(len(distances), dtype=torch.bool)
    nearest = distances.masked_fill(~others, torch.inf).amin(1, keepdim=True)
    # d_nearest / d gives the same mixing weights as 1 / d, without overflow
    inverse = torch.where(nearest > 0, nearest / distances, (distances == 0).double()).masked_fill(~others, 0)
    weights = (1 - self_weight) * inverse / inverse.sum(1, keepdim=True)
    return weights.masked_fill(~others, self_weight)


def uniform_weights(sites: int, self_weight: float | None = None) -> Tensor:
    """Return the mixing weights of AdaFed's control experiment: λ for the own site and equal weights for all other
    sites.

    Args:
        self_weight: λ, or None for the weight 1/N for every site
    """
    if sites == 1 or self_weight is None:
        return torch.full((sites, sites), 1 / sites, dtype=torch.float64)
    return mixing_weights(1 - torch.eye(sites, dtype=torch.float64), self_weight)


class StatisticsMixture(Algorithm):
    """The base of the three AdaFed methods, in which each site receives a mixture of the models of similar sites
    (Equations 2 to 8).

    Each site receives ψ_i ← Σ_j w_ij ψ_j, where the mixing weights W follow from the sites' feature statistics. The
    batch norm layers φ_i stay at site i; if the network has no batch norm, normalisation layers of other kinds stay at
    the site.
    """

    paper = "Chen et al. 2022"
    # The settings of Equations 2 to 8 and of the paper's experiments, as far as the paper states them.
    literal: ClassVar[Mapping[str, Any]] = {
        **BY_ITSELF,
        "algorithm.self_weight": 0.5,
        "algorithm.weights": "similarity",
        "algorithm.bn_share": "local",
        "training.optimizer": "sgd",
        "training.momentum": 0.0,
    }
    protocols = {"paper": literal}
    stays = "batch norm: weights and statistics"
    bytes_sent = "0.98"
    personal: ClassVar[bool] = True
    layers: ClassVar[Layers] = "all"  # the batch norm layers whose input statistics are measured

    self_weight: float = Field(
        0.5, ge=0, le=1, description="λ of Eq. 8: the weight of a site's own model in the site's mixture"
    )
    weights: Literal["similarity", "uniform"] = Field(
        "similarity",
        description="`uniform` is a control experiment: λ is the same as with `similarity`, and all other sites have "
        "equal weights",
    )
    bn_share: Literal["local", "weighted", "mean"] = Field(
        "local",
        description="`local`: batch norm stays at the site. `weighted`: batch norm is mixed with the sites' weights W, "
        "like all other layers. `mean`: batch norm is averaged over all sites",
    )

    def networks(self, build: ModelFactory) -> Modules:
        model = build()
        self.check({"model": model})
        return {"model": model, "statistics": StatisticsHolder(self._channels(model))}

    def _channels(self, model: nn.Module) -> list[int]:
        return [input_channels(layer) for layer in measured_layers(model, self.layers)]

    @property
    def measures(self) -> bool:
        return True

    def groups(self) -> tuple[Group, ...]:
        title = "model without norms" if self.bn_share == "local" else "model"
        mixed = network("model") if self.bn_share == "weighted" else network("model", but=local_norm_names)
        model = Group("model", mixed, self.aggregator, personal=True, title=title, site_details=self._weights_detail)
        norms = Group("norms", self._norms, site_mean)
        return (model, norms) if self.bn_share == "mean" else (model,)

    def statistics(self) -> Group:
        return Group(
            "statistics",
            network("statistics"),
            lambda server: ComparedOnly(self.compare),
            travels="up",
            personal=True,
            title="feature statistics",
            check=_possible,
            ranges=self._ranges,
            disclosure_notes=self._disclosure_lines,
        )

    def _norms(self, modules: Modules) -> Tensors:
        everything = modules["model"].state_dict()
        return {name: everything[name] for name in local_norm_names(modules["model"])}

    def aggregator(self, server: ServerSide) -> SimilarityMix:
        """Return the aggregator of Equation 2, whose mixing weights W follow from the latest statistics."""
        measured = server.aggregators.get("statistics")
        weights = measured.weights() if isinstance(measured, ComparedOnly) else self.compare(server.sites, {})
        return SimilarityMix(weights)

    def compare(self, sites: Sequence[str], measured: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Compute the mixing weights W from the sites' statistics.

        Before the sites have measured statistics, each row of the matrix W consists of equal mixing weights. A site
        without statistics keeps its own model, and the mixtures of other sites do not include this model.
        """
        statistics = {site: statistics_of(row) for site, row in measured.items() if row["samples"] > 0}
        if self.measures and not statistics:
            return uniform_weights(len(sites))
        if self.weights == "uniform":
            return uniform_weights(len(sites), self.self_weight)
        weights = torch.eye(len(sites), dtype=torch.float64)
        here = torch.tensor([place for place, site in enumerate(sites) if site in statistics])
        distances = wasserstein_distances([statistics[site] for site in sites if site in statistics])
        weights[here[:, None], here] = mixing_weights(distances, self.self_weight)
        return weights

    def _weights_detail(self, aggregator: Aggregator, sites: Sequence[str]) -> Facts:
        return {"similarity": {"sites": list(sites), "weights": cast(SimilarityMix, aggregator).weights.tolist()}}

    def _ranges(self, modules: Modules, task: Task) -> Ranges:
        largest = FURTHEST * max(1.0, task.largest_input)
        of = {"mean": (-largest, largest), "variance": (0.0, largest**2)}
        names = modules["statistics"].state_dict()
        return {name: of[kind] for name in names for kind in of if name.endswith(kind)}

    def _disclosure_lines(self, tensors: Mapping[str, Tensor]) -> list[str]:
        numbers = sum(tensor.numel() for name, tensor in tensors.items() if name != "samples")
        return [
            f"statistics: mean and variance of {(len(tensors) - 1) // 2} layers' inputs over all training cases, "
            f"{numbers} numbers, once; the method adds no noise of its own",
            "statistics: means over few cases come close to single cases' features; with one case they are its own",
            "statistics: how similar two sites' data are shows in the mixing weights, which the run records",
        ]

    def hold(self, context: TrainContext, statistics: Statistics) -> None:
        cast(StatisticsHolder, context.modules["statistics"]).take(statistics, context.cases.count())


def _possible(tensors: Mapping[str, Tensor]) -> None:
    if tensors["samples"] < 1:
        raise Refused("statistics/samples is below 1; nothing was measured")


class AdaFed(StatisticsMixture):
    """AdaFed in which each site measures feature statistics with a pre-trained network f, and these statistics
    determine the mixing weights W.

    In phase "measure", which is one round without training, the server sends the network f to the sites. In phase
    "measure", each site returns the statistics of the inputs of f's batch norm layers. In phase "train", site i
    receives the mixture of models ψ_i ← Σ_j w_ij ψ_j.
    """

    title = "AdaFed"
    sends = (
        "feature statistics, model without norms; the statistics are sent once; the server reads the cases that are "
        "declared public"
    )
    extra_work = "pre-training at the server, and one pass over the data for the feature statistics"
    suits = "groups of similar hospitals"
    protocols = {
        "paper": {
            **StatisticsMixture.literal,
            "algorithm.pretraining.source": "share",
            "algorithm.pretraining.share": 0.2,
        }
    }
    made_anew = frozenset({"pretrained", "statistics"})

    name: Literal["adafed"] = "adafed"
    pretraining: Pretraining = Field(
        Pretraining(),
        description="origin of the pre-trained network f, with which the sites measure their feature statistics",
    )
    init_from_pretrained: bool = Field(
        False,
        description="whether the sites' models start from the weights of f. The paper does not specify whether "
        "models start from f, and models in the paper's code do not start from f",
    )

    @property
    def measures(self) -> bool:
        return self.weights == "similarity"

    @property
    def needs_f(self) -> bool:
        return self.measures or self.init_from_pretrained

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        return {**modules, "pretrained": copy.deepcopy(modules["model"]).requires_grad_(False)}

    def check(self, modules: Modules) -> None:
        require(
            local_norm_names(modules["model"]),
            self.name,
            "norms",
            "give it batch norm (network.norm=batch) or choose d-adafed",
        )

    def private(self) -> Private:
        """Return the privacy mechanism; raise PlanError if the server would have to read cases of the sites to train
        the network f.
        """
        if self.needs_f and self.pretraining.source != "file":
            raise PlanError(
                "algorithm.pretraining.source: the server would read a share of the cases, which breaks the promise "
                "of privacy; use file, trained on other data"
            )
        return Private(
            ("model",), disclosure_notes="the statistics leave once, cut and with noise of their own account"
        )

    def phases(self, rounds: int) -> Sequence[Phase]:
        if not self.needs_f:
            return super().phases(rounds)
        pretrained = Group("pretrained", network("pretrained"), travels="down")
        measure = Phase(
            "measure",
            1,
            (pretrained, *((self.statistics(),) if self.measures else ())),
            self.begin,
            before=self.make_f,
            trains=False,
            releases=int(self.measures),
            disclosure_notes=self._public_share(),
        )
        train, *more = super().phases(rounds)
        before = self.start_from_f if self.init_from_pretrained else None
        return [measure, replace(train, before=before), *more]

    def make_f(self, server: ServerSide, modules: Modules) -> Facts:
        facts = self.pretraining.obtain(modules["pretrained"], server)
        return {"pretraining": {**facts, "start": self.init_from_pretrained}}

    def start_from_f(self, server: ServerSide, modules: Modules) -> Facts:
        modules["model"].load_state_dict(server.aggregators["pretrained"].current(server.sites[0]))
        return {}

    def _public_share(self) -> tuple[str, ...]:
        if self.pretraining.source != "share":
            return ()
        share = f"{self.pretraining.share:.0%} of the training cases"
        return (f"pre-training: {share} themselves are declared public and read at the server",)

    def begin(self, context: TrainContext) -> float:
        if self.init_from_pretrained:
            context.modules["model"].load_state_dict(context.modules["pretrained"].state_dict())
        return self.measure(context) if self.measures else math.nan

    def measure(self, context: TrainContext) -> float:
        what = context.modules["pretrained"], context.cases.in_order(), context.compute.device, self.layers
        if context.private:
            noisy = context.private.noisy_mean(moments_of_cases(*what))
            self.hold(context, statistics_from(noisy, self._channels(context.modules["model"])))
        else:
            self.hold(context, batch_norm_input_statistics(*what))
        return math.nan


class DAdaFed(AdaFed):
    """AdaFed in which only the input of the classification layer determines the mixing weights W."""

    title = "d-AdaFed"
    sends = "feature statistics, model without norms; the server reads public cases, as AdaFed's server does"
    suits = "groups of similar hospitals; d-AdaFed uses the statistics of one layer only"
    layers = "last"

    name: Literal["d-adafed"] = "d-adafed"  # type: ignore[assignment]

    def check(self, modules: Modules) -> None:
        require(
            head_names(modules["model"]), self.name, "features", "choose a network with a linear or convolution layer"
        )
        require_features(modules["model"], self.name)

    def private(self) -> Private:
        return super().private()
