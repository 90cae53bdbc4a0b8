"""FedDG-GA (Zhang et al., Federated Domain Generalization with Generalization Adjustment, CVPR 2023)."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from medsilo.extend import Group
from medsilo.extend.methods import (
    Average,
    Identity,
    ModelFactory,
    Modules,
    Numbers,
    ServerSide,
    Shares,
    StalenessWeightedMean,
    TrainContext,
    WeighingMethod,
)

WIDEST = 100.0  # maximum absolute generalisation gap; larger gaps are clipped


class FedDGGA(WeighingMethod):
    """θ ← Σ a_i θ_i with a_i ← a_i + d_r / K · G_i / max_j |G_j|, clipped to [0, 1] and normalised.

    The generalisation gap is G_i = L_i(θ) − L_i(θ_i): the training loss of the shared model minus that of the model
    that the site sent. The step d_r decreases linearly from `step` to 0 over the rounds.
    """

    title = "FedDG-GA"
    paper = "Zhang et al. 2023"
    sends = "generalisation gap, model, running statistics"
    extra_work = "two passes without training"
    suits = "one model for hospitals that do not take part in training"
    paced = True

    name: Literal["feddg-ga"] = "feddg-ga"
    step: float = Field(
        0.2,
        gt=0,
        le=1,
        description="d: limit on the change of the sites' weights in the mean, summed over all sites, in the "
        "first round",
    )

    def networks(self, build: ModelFactory) -> Modules:
        """Build the networks and the values that a site keeps. A site sends G_i as `value`. The site also stores its
        last loss L_i(θ_i), and `measured` is true if this loss is known.
        """
        return {"model": build(), "gap": Numbers(value=0.0, own_loss=0.0, measured=False)}

    def groups(self) -> tuple[Group, ...]:
        gap = Group(
            "gap",
            lambda modules: {"gap": modules["gap"].get_buffer("value")},
            lambda server: Identity(),
            "up",
            personal=True,
            title="generalisation gap",
            ranges=lambda modules, task: {"gap": (-WIDEST, WIDEST)},
            disclosure_notes=lambda tensors: [
                "gap: in every round, how much larger the mean loss over all training cases is under the shared model "
                "than under this site's own, from disclosed losses; 0 where none is"
            ],
            average=Average("the difference of two mean losses over a site's training cases", lambda cases, _: cases),
        )
        return gap, *super().groups()

    def train_round(self, context: TrainContext) -> float:
        """Compute the generalisation gap of the received model, train, and compute the loss of the trained model for
        the next round's gap.
        """
        model, gap = context.modules["model"], context.modules["gap"]
        value, own_loss, measured = map(gap.get_buffer, ("value", "own_loss", "measured"))
        shared = context.cases.told_loss(model)
        value.zero_()
        if shared is not None and measured:
            value.copy_((shared - own_loss).clamp(-WIDEST, WIDEST))
        loss = context.train()
        own = context.cases.told_loss(model)
        own_loss.fill_(own or 0.0)
        measured.fill_(own is not None)
        return loss

    def weigh(self, server: ServerSide, mean: StalenessWeightedMean) -> Shares:
        """Increase the weights of sites with a large generalisation gap. The aggregator's `memory` holds the weights
        and the number of rounds.
        """
        sites, before = server.sites, {"a": 1 / len(server.sites), "rounds": 0.0}
        a = {site: mean.memory.get(site, before)["a"] for site in sites}
        number = mean.memory.get(sites[0], before)["rounds"]
        gaps = {site: float(server.aggregators["gap"].current(site)["gap"]) for site in mean.samples}
        # in the first round, all gaps are 0, so the weights stay the same
        a = moved(a, gaps, self.step * (1 - (number - 1) / server.training.rounds))
        mean.memory = {site: {"a": a[site], "rounds": number + 1} for site in sites}
        return {site: a[site] for site in mean.samples}


def moved(a: dict[str, float], gaps: Mapping[str, float], step: float) -> dict[str, float]:
    """Return the sites' weights after a step that increases the weights of sites with a large gap. `step` is the
    largest possible sum of the weights' changes.
    """
    largest = max(map(abs, gaps.values()))
    if not largest:
        return a
    found = {site: min(1.0, max(0.0, own + step / len(a) * gaps.get(site, 0.0) / largest)) for site, own in a.items()}
    total = sum(found.values())
    return {site: value / total for site, value in found.items()}
