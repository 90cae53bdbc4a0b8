"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020."""

from dataclasses import replace
from typing import Literal

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.training import Training
from medsilo.methods.bases import Numbers, ServerStep, trained_weights
from medsilo.mixing.server import REACH, reach_of
from medsilo.mixing.server import FedNova as FedNovaStep
from medsilo.schedule.phase import Group, ModelFactory, ServerSide
from medsilo.schedule.train_context import TrainContext


class FedNova(ServerStep):
    """The server divides each site's update by the site's number of steps: w ← w - τ_eff Σ p_i (w - w_i) / ‖a_i‖₁.

    Without the division by ‖a_i‖₁, sites with many steps would pull the model towards their own optimum. ‖a_i‖₁ follows
    from the site's number of steps in the round and the momentum of SGD; with Adam, ‖a_i‖₁ is the number of steps.
    SGD's momentum restarts in every round, regardless of `training.optimizer_state`, because ‖a_i‖₁ counts only the
    gradients of the round.
    """

    title = "FedNova"
    paper = "Wang et al. 2020"
    sends = "model and effective number of steps, running statistics"
    suits = "hospitals with very different numbers of cases"
    undefended = (
        "mixing: fednova weighs each hospital by the steps that the hospital reports, so a robust rule can't hold; use "
        "fedavg, scaffold or fedavgm"
    )

    name: Literal["fednova"] = "fednova"

    def check_training(self, training: Training) -> None:
        if training.nesterov:
            raise PlanError("training.nesterov: FedNova supports only plain momentum; set training.nesterov=false")

    def networks(self, build: ModelFactory) -> Modules:
        return super().networks(build) | {"reach": Numbers(value=1.0)}

    def groups(self) -> tuple[Group, ...]:
        model, buffers = super().groups()
        title = "model and effective number of steps"
        return replace(model, of=with_reach, title=title, check=reach_of), buffers

    def step(self, server: ServerSide) -> FedNovaStep:
        return FedNovaStep(uniform=self.weighting == "uniform")

    def train_round(self, context: TrainContext) -> float:
        training = context.training
        if training.momentum:
            context.optimizers["model"].state.clear()
        loss = context.train()
        steps = training.steps_of_round(context.cases.steps)
        context.modules["reach"].get_buffer("value").fill_(reach(steps, training.momentum))
        return loss


def with_reach(modules: Modules) -> Tensors:
    return trained_weights(modules) | {REACH: modules["reach"].get_buffer("value")}


def reach(steps: int, momentum: float) -> float:
    """Return ‖a‖₁ = Σ_k a_k, where a_k is the factor of the gradient of step k in the weights after all steps.

    With momentum ρ, a_k = 1 + ρ + … + ρ^(τ - k). Without momentum, ‖a‖₁ is the number of steps τ.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
