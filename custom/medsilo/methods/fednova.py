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
    """w ← w - τ_eff Σ p_i (w - w_i) / ‖a_i‖₁: sites that make more steps don't pull the model towards themselves.

    ‖a_i‖₁ follows from the steps a site made in the round and SGD's momentum, and is their number with Adam. It counts
    the round's own gradients, so SGD's momentum restarts in every round, whatever `training.optimizer_state` says. With
    momentum from earlier rounds, sites would again pull the model by their number of steps.
    """

    title = "FedNova"
    paper = "Wang et al. 2020"
    undefended = (
        "mixing: fednova weighs each hospital by the steps that it says it made, so a robust rule can't hold; use "
        "fedavg, scaffold or fedavgm"
    )

    name: Literal["fednova"] = "fednova"

    def check_training(self, training: Training) -> None:
        if training.nesterov:
            raise PlanError(
                "training.nesterov: FedNova counts how far steps with plain momentum reach; set it to false"
            )

    def networks(self, build: ModelFactory) -> Modules:
        return super().networks(build) | {"reach": Numbers(value=1.0)}

    def groups(self) -> tuple[Group, ...]:
        model, buffers = super().groups()
        title = "model and how far its steps reach"
        return replace(model, of=with_reach, title=title, check=reach_of), buffers

    def step(self, server: ServerSide) -> FedNovaStep:
        return FedNovaStep(uniform=self.weighting == "uniform")

    def train_round(self, bench: TrainContext) -> float:
        training = bench.training
        if training.momentum:
            bench.optimizers["model"].state.clear()
        loss = bench.train()
        steps = training.steps_of_round(bench.cases.steps)
        bench.modules["reach"].get_buffer("value").fill_(reach(steps, training.momentum))
        return loss


def with_reach(modules: Modules) -> Tensors:
    """Return the trained weights and ‖a_i‖₁, without which they can't be merged."""
    return trained_weights(modules) | {REACH: modules["reach"].get_buffer("value")}


def reach(steps: int, momentum: float) -> float:
    """‖a‖₁ = Σ_k a_k, a_k being how much of the gradient of step k is in the weights after all steps.

    With momentum ρ, a_k = 1 + ρ + … + ρ^(τ - k); without, this is τ, the number of steps.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
