"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020."""

from typing import Literal

import torch
from pydantic import Field

from medsilo.core.errors import PlanError
from medsilo.learning.steps import correcting, pull_back
from medsilo.learning.training import Training
from medsilo.methods.fedavg import FedAvg
from medsilo.schedule.declared import Private
from medsilo.schedule.train_context import TrainContext


class FedProx(FedAvg):
    """FedAvg in which site k minimises F_k(w) + μ/2 ‖w − w_t‖², where w_t is the model that the site received."""

    title = "FedProx"
    paper = "Li et al. 2020"
    sends = "model"
    extra_work = "none; the option `partial` simulates slow hospitals"
    suits = "many local steps in a round, or hospitals whose computers differ in speed"

    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(
        0.01,
        ge=0,
        le=1000,
        description="μ: strength of the penalty μ/2 ‖w − w_server‖² on the distance from the received model",
    )
    partial: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a site is slow in a round and makes only a random share of its steps. The "
        "server uses the result of a slow site, too (Section 5.2)",
    )

    def check_training(self, training: Training) -> None:
        if self.partial and self.amplitude:
            raise PlanError(
                "algorithm.partial: an amplitude must average all of a site's images, not a straggler's first few; set "
                "partial=0 or amplitude=null"
            )

    def private(self) -> Private:
        return Private(
            ("model",), disclosure_notes="the pull towards the received model is added to the noisy gradient"
        )

    def train_round(self, context: TrainContext) -> float:
        straggles, drawn = torch.rand(2, generator=context.random).tolist()
        share = drawn if straggles < self.partial else 1.0
        pull = pull_back(list(context.modules["model"].parameters()), self.mu)
        with correcting(context.optimizers["model"], pull):
            return context.train(share=share)
