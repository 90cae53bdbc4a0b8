"""MR-MTL, mean-regularized multi-task learning: Liu et al., On Privacy and Personalization in Cross-Silo Federated
Learning, NeurIPS 2022."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Literal

from pydantic import Field

from medsilo.core.tensors import Modules
from medsilo.course.declared import Private
from medsilo.course.group import Group, network
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Phase
from medsilo.course.workbench import Blueprint, Workbench
from medsilo.learning.personal import copy_into, near_as_it_arrived
from medsilo.learning.steps import correcting
from medsilo.learning.training import Training
from medsilo.methods.fedavg import Averaging


class MRMTL(Averaging):
    """Sites minimise F_k(w_k) + λ/2 ‖w_k − w̄‖², each with a model of its own; w̄ ← Σ p_k w_k is their mean.

    λ = 0 is training alone; a large λ comes near FedAvg. "model" is w_k, which goes on from round to round. "global" is
    where w̄ arrives, and from where w_k leaves.
    """

    title = "MR-MTL"
    paper = "Liu et al. 2022"

    name: Literal["mr-mtl"] = "mr-mtl"
    weighting: Literal["samples", "uniform"] = Field(
        "uniform", description="weight of a site in the average: by its number of training cases, or equal"
    )
    pull: float = Field(
        0.1, ge=0, le=1000, description="λ: how strongly a site's own model is held near the mean of all; 0 is local"
    )

    @property
    def outcome(self) -> Outcome:
        return OwnModels(common="global")

    def networks(self, build: Blueprint) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model).requires_grad_(False)}

    def phases(self, training: Training) -> Sequence[Phase]:
        own = Group("global", network("global"), self.mean, title="own model")
        return [Phase("train", training.rounds, (own,), self.work)]

    def private(self) -> Private:
        return Private(("model",), says="the pull to the mean is added to the noisy gradient")

    def work(self, bench: Workbench) -> float:
        """w_k ← w_k − η (∇F_k(w_k) + λ (w_k − w̄)), with w̄ as it arrived."""
        own, mean = bench.modules["model"], bench.modules["global"]
        with correcting(bench.optimizers["model"], near_as_it_arrived(own, mean, self.pull)):
            loss = bench.train()
        copy_into(mean, own)
        return loss
