"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021."""

from typing import Literal

from pydantic import Field

from medsilo.extend.methods import FedPer, TrainContext, head_names, keeping_statistics, learning_only


class FedRep(FedPer):
    """FedPer in turns: h_k ← argmin f_k(h, φ) nearly, with the φ that arrived; then φ_k ← φ − η ∇f_k(h_k, φ).

    h_k is the site's head, φ the body that all share; φ ← Σ p_k φ_k. While the head learns, batch norm's running
    statistics stay as they are: they belong to the body.
    """

    title = "FedRep"
    paper = "Collins et al. 2021"

    name: Literal["fedrep"] = "fedrep"  # type: ignore[assignment]
    head_epochs: int = Field(
        10, ge=0, le=1000, description="passes in which the head alone learns, before the plan's for the body alone"
    )

    def work(self, bench: TrainContext) -> float:
        model = bench.modules["model"]
        head = set(head_names(model))
        body = {name for name, _ in model.named_parameters()} - head
        with learning_only(model, head), keeping_statistics(model):
            for number in range(self.head_epochs):
                bench.epoch([bench.lesson()], -1 - number)  # in other orders than the body's epochs 0, 1, ...
        with learning_only(model, body):
            return bench.train()
