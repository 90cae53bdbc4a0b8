"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020."""

from typing import Literal

import torch
from pydantic import Field

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules
from medsilo.learning.steps import Shift, correcting
from medsilo.learning.training import Training
from medsilo.methods.bases import ServerStep, learning_weights, zeros_like
from medsilo.mixing.aggregators import Aggregator, UniformMean
from medsilo.mixing.server import Scaffold as ServerControl
from medsilo.schedule.algorithm import BY_ITSELF
from medsilo.schedule.phase import Group, ModelFactory, ServerSide, network
from medsilo.schedule.train_context import TrainContext


class Scaffold(ServerStep):
    """Control variates correct the gradients at each site for the differences between sites.

    A step at site i is y ← y - η (g(y) - c_i + c), where g is the gradient, and c and c_i are control variates. The
    server's update is x ← x + η_g mean(y_i - x) and c ← c + |S| / N mean(c_i⁺ - c_i), where all sites have the same
    weight. The server's control variate c goes to the sites, and c_i stays at site i. The new control variate c_i⁺ is
    the mean gradient of the site's steps, even if the steps use momentum. With plain SGD, c_i⁺ equals the paper's
    option II, c_i - c + (x - y) / (K η).
    """

    title = "SCAFFOLD"
    paper = "Karimireddy et al. 2020"
    sends = "model, running statistics, control variate"
    stays = "the hospital's control variate c_i"
    bytes_sent = "2"
    suits = "many local steps and plain SGD"
    protocols = {"paper": {**BY_ITSELF, "algorithm.optimizer": "sgd"}}

    name: Literal["scaffold"] = "scaffold"
    weighting: Literal["uniform"] | None = "uniform"
    server_lr: float = Field(
        1.0, gt=0, le=10, description="η: learning rate of the server's step along the sites' mean change"
    )
    optimizer: Literal["sgd", "any"] = Field(
        "sgd",
        description="`sgd`: only SGD is allowed, as in the paper. `any`: every optimizer is allowed, and gradients are "
        "corrected before the optimizer uses them",
    )

    def check_training(self, training: Training) -> None:
        if training.optimizer != "sgd" and self.optimizer == "sgd":
            raise PlanError(
                f"training.optimizer: SCAFFOLD is made for sgd, not {training.optimizer}; choose sgd, or set "
                "algorithm.optimizer=any"
            )

    def networks(self, build: ModelFactory) -> Modules:
        modules = super().networks(build)
        return modules | {"control": zeros_like(modules["model"]), "own-control": zeros_like(modules["model"])}

    def groups(self) -> tuple[Group, ...]:
        said = (
            "control: in the first round, this site's mean gradient over its training cases; later, the change of this "
            "gradient. A gradient over few cases reveals much about these cases"
        )
        control = Group(
            "control",
            network("control"),
            lambda server: ServerControl(),
            title="control variate",
            disclosure_notes=lambda tensors: [said],
        )
        return *super().groups(), control

    def step(self, server: ServerSide) -> Aggregator:
        return UniformMean(rate=self.server_lr)

    def train_round(self, context: TrainContext) -> float:
        model = context.modules["model"]
        control, own = (list(context.modules[name].parameters()) for name in ("control", "own-control"))
        shifts = [c - c_i for c, c_i in zip(control, own, strict=True)]
        # AdamW applies weight decay separately from the gradient, so control variates must not contain weight decay.
        decay = 0.0 if context.training.optimizer == "adamw" else context.training.weight_decay
        shift = Shift(learning_weights(model), shifts, decay)
        with correcting(context.optimizers["model"], shift):
            loss = context.train()
        with torch.no_grad():
            for c, c_i, new in zip(control, own, shift.mean(), strict=True):
                # as if every site had changed its control variate by new - c_i
                c.add_(new - c_i)
                c_i.copy_(new)
        return loss
