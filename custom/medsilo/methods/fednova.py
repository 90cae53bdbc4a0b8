"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from medsilo.learning.steps import counting, reach
from medsilo.methods.base import Blueprint, Groups, Modules, Workbench
from medsilo.methods.stepping import Stepping
from medsilo.mixing.server import REACH, reach_of
from medsilo.mixing.server import FedNova as FedNovaStep


class Reach(nn.Module):
    """Where a site's ‖a_i‖₁ lies."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones((), dtype=torch.float64))


class FedNova(Stepping):
    """w ← w - τ_eff Σ p_i (w - w_i) / ‖a_i‖₁: sites that make more steps don't pull the model towards themselves.

    ‖a_i‖₁ follows from the steps a site made in the round and SGD's momentum, and is their number with Adam. Momentum
    that a site kept from earlier rounds is not in it.
    """

    title = "FedNova"
    paper = "Wang et al. 2020"
    travels = "model; how far the local steps reach"

    name: Literal["fednova"] = "fednova"

    def networks(self, build: Blueprint) -> Modules:
        return super().networks(build) | {"reach": Reach()}

    def shared(self, modules: Modules, phase: str) -> Groups:
        groups = super().shared(modules, phase)
        return groups | {"model": groups["model"] | {REACH: cast(Reach, modules["reach"]).value}}

    def examine(self, groups: Groups, phase: str) -> None:
        reach_of(groups["model"])

    def server_step(self) -> FedNovaStep:
        return FedNovaStep(uniform=self.weighting == "uniform")

    def train(self, bench: Workbench, phase: str) -> float:
        with counting(bench.optimizers["model"]) as steps:
            loss = bench.train()
        cast(Reach, bench.modules["reach"]).value.fill_(reach(steps(), bench.training.momentum))
        return loss
