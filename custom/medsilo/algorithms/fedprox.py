"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020."""

from typing import Literal

from pydantic import Field

from medsilo.algorithms.base import Workbench
from medsilo.algorithms.fedavg import FedAvg
from medsilo.learning.steps import proximal_step


class FedProx(FedAvg):
    """FedAvg whose sites minimise F_k(w) + μ/2 ‖w − w_t‖², w_t being the model as it arrived."""

    title = "FedProx"
    paper = "Li et al. 2020"

    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(0.01, ge=0, le=1000)

    def train(self, bench: Workbench, phase: str) -> float:
        return bench.train(step=proximal_step(list(bench.modules["model"].parameters()), self.mu))
