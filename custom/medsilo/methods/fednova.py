"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules, Tensors
from medsilo.course.phase import Blueprint, Group, ServerSide, Workbench
from medsilo.learning.steps import counting, reach
from medsilo.learning.training import Training
from medsilo.methods.bases import ServerStep, other_tensors, trained_weights
from medsilo.mixing.server import NOVA_TRUSTS, REACH, reach_of
from medsilo.mixing.server import FedNova as FedNovaStep


class Reach(nn.Module):
    """A place for a site's ‖a_i‖₁."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones((), dtype=torch.float64))


class FedNova(ServerStep):
    """w ← w - τ_eff Σ p_i (w - w_i) / ‖a_i‖₁: sites that make more steps don't pull the model towards themselves.

    ‖a_i‖₁ follows from the steps a site made in the round and SGD's momentum, and is their number with Adam. It counts
    the round's own gradients, so SGD's momentum starts afresh in every round, whatever `training.optimizer_state` says:
    with momentum from earlier rounds sites would again pull the model by how many steps they make.
    """

    title = "FedNova"
    paper = "Wang et al. 2020"

    name: Literal["fednova"] = "fednova"

    def suits(self, training: Training) -> None:
        super().suits(training)
        if training.nesterov:
            raise PlanError(
                "training.nesterov: FedNova counts how far steps with plain momentum reach; set it to false"
            )

    def networks(self, build: Blueprint) -> Modules:
        return super().networks(build) | {"reach": Reach()}

    def groups(self) -> tuple[Group, ...]:
        title = "model and how far its steps reach"
        model = Group("model", with_reach, self.step, title=title, check=possible_reach, undefended=NOVA_TRUSTS)
        return model, Group("buffers", other_tensors, self.mean, title="running statistics")

    def step(self, server: ServerSide) -> FedNovaStep:
        return FedNovaStep(uniform=self.weighting == "uniform")

    def work(self, bench: Workbench) -> float:
        optimizer = bench.optimizers["model"]
        if bench.training.momentum:
            optimizer.state.clear()
        with counting(optimizer) as steps:
            loss = bench.train()
        cast(Reach, bench.modules["reach"]).value.fill_(reach(steps(), bench.training.momentum))
        return loss


def with_reach(modules: Modules) -> Tensors:
    """Return the trained weights and ‖a_i‖₁, without which they can't be merged."""
    return trained_weights(modules) | {REACH: cast(Reach, modules["reach"]).value}


def possible_reach(tensors: Tensors) -> None:
    """Raise Refused if no steps can have this ‖a_i‖₁."""
    reach_of(tensors)
