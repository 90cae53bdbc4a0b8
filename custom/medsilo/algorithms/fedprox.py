"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020."""

from typing import Literal

from pydantic import Field

from medsilo.algorithms.base import Workbench
from medsilo.algorithms.fedavg import FedAvg
from medsilo.learning.steps import correcting, pull_back


class FedProx(FedAvg):
    """FedAvg whose sites minimise F_k(w) + μ/2 ‖w − w_t‖², w_t being the model as it arrived."""

    title = "FedProx"
    paper = "Li et al. 2020"

    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(0.01, ge=0, le=1000)

    def train(self, bench: Workbench, phase: str) -> float:
        pull = pull_back(list(bench.modules["model"].parameters()), self.mu)
        with correcting(bench.optimizers["model"], pull):
            return bench.train()
