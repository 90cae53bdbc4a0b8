"""FedCE (Jiang et al., Fair Federated Medical Image Segmentation via Client Contribution Estimation, CVPR 2023)."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Literal, cast

import torch
from torch import Tensor, nn

from medsilo.extend import Group, Refused
from medsilo.extend.methods import (
    ModelFactory,
    Modules,
    Numbers,
    ServerSide,
    SharedNumbers,
    Shares,
    StalenessWeightedMean,
    TrainContext,
    WeighingMethod,
    copy_into,
)

LEAST = 1e-6  # minimum contribution, to which smaller contributions are raised before all contributions are normalised


class FedCE(WeighingMethod):
    """θ ← Σ a_k θ_k, where the weight a_k is site k's contribution to the gradients and to the score.

    The contribution to the gradients is 1 − cos(g_k, Σ_{j≠k} a_j g_j) with g_k = θ_k − θ, where the cosine is averaged
    over the rounds. The contribution to the score is 1 minus the mean score of the models without k, (θ − a_k θ_k) / (1
    − a_k), on k's validation cases. Each contribution is normalised over the sites, and a is the normalised sum of both
    contributions.
    """

    title = "FedCE"
    paper = "Jiang et al. 2023"
    sends = "model, running statistics, contribution"
    extra_work = "one additional validation"
    suits = "segmentation with small or unusual hospitals"

    name: Literal["fedce"] = "fedce"

    def networks(self, build: ModelFactory) -> Modules:
        """Build the networks and the values that a site keeps. A site sends `missed`, which is 1 minus the mean score
        of the models without this site, and receives its weight a_k as `share`.

        To average `missed` over the rounds, a site keeps the sum and the count of its values; the first round counts
        as a value of 0.
        """
        model = build()
        contribution = Numbers(missed=1.0, share=0.0, scores=0.0, rounds=1.0)
        return {"model": model, "sent": deepcopy(model).requires_grad_(False), "contribution": contribution}

    def groups(self) -> tuple[Group, ...]:
        contribution = Group(
            "contribution",
            lambda modules: {name: modules["contribution"].get_buffer(name) for name in ("missed", "share")},
            lambda server: SharedNumbers(lambda site: {"share": server.aggregators["model"].shares.get(site, 0.0)}),
            personal=True,
            ranges=lambda modules, task: dict.fromkeys(("missed", "share"), (0.0, 1.0)),
            disclosure_notes=lambda tensors: [
                "contribution: in every round 1 minus the mean disclosed score over the validation cases of the "
                "shared models without this site's part in them; each round adds one score to that mean"
            ],
        )
        return *super().groups(), contribution

    def train_round(self, context: TrainContext) -> float:
        numbers = dict(context.modules["contribution"].named_buffers())
        share = float(numbers["share"])
        if 0 < share < 1:
            score = context.cases.told_score(without(context.modules["model"], context.modules["sent"], share))
            if score is None:
                raise Refused(
                    "fedce weights hospitals by validation scores, and this one has none to send; choose fedavg"
                )
            numbers["scores"].add_(score)
            numbers["rounds"].add_(1)
            numbers["missed"].copy_(1 - numbers["scores"] / numbers["rounds"])
        loss = context.train()
        copy_into(context.modules["sent"], context.modules["model"])
        return loss

    def weigh(self, server: ServerSide, mean: StalenessWeightedMean) -> Shares:
        told = cast(SharedNumbers, server.aggregators["contribution"])
        sites = list(mean.samples)
        before = [mean.memory.get(site, {"share": 1 / len(sites)})["share"] for site in sites]
        (products,) = mean.products().values()
        cosines = cosines_with_others(torch.tensor(before, dtype=torch.float64), products[1:, 1:])
        for site, cosine in zip(sites, cosines, strict=True):
            own = mean.memory.setdefault(site, {"cosine": 0.0, "rounds": 0.0})
            own["rounds"] += 1
            own["cosine"] += (cosine - own["cosine"]) / own["rounds"]
        gradient = normalised([1 - mean.memory[site]["cosine"] for site in sites])
        data = normalised([float(told.sent(site)["missed"]) for site in sites])
        shares = normalised([one + other for one, other in zip(gradient, data, strict=True)])
        for site, share in zip(sites, shares, strict=True):
            mean.memory[site]["share"] = share
        return dict(zip(sites, shares, strict=True))


def without(model: nn.Module, module: nn.Module, share: float) -> nn.Module:
    """Return (θ − a_k θ_k) / (1 − a_k), the mean model without site k. Integer tensors are copied from θ."""
    rest = deepcopy(model)
    theirs = module.state_dict()
    with torch.no_grad():
        for name, tensor in rest.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_((tensor.double() - share * theirs[name].double()) / (1 - share))
    return rest


def cosines_with_others(shares: Tensor, g: Tensor) -> list[float]:
    """Return cos(g_k, Σ_{j≠k} a_j g_j) for every site k, given the inner products of all g. The cosine with a vector of
    length 0 is 0.
    """
    found = []
    for place in range(len(g)):
        others = shares.clone()
        others[place] = 0
        length = math.sqrt(max(0.0, float(g[place, place] * (others @ g @ others))))
        found.append(max(-1.0, min(1.0, float(g[place] @ others) / length)) if length else 0.0)
    return found


def normalised(values: Sequence[float]) -> list[float]:
    cut = [max(value, LEAST) for value in values]
    return [value / math.fsum(cut) for value in cut]
