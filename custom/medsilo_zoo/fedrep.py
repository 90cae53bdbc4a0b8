"""FedRep (Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021)."""

from typing import Literal

from pydantic import Field

from medsilo.extend.methods import FedPer, TrainContext, head_names, keeping_statistics, learning_only


class FedRep(FedPer):
    """FedPer with alternating training: first the head h_k ← argmin f_k(h, φ) with the received body φ, and then the
    body φ_k ← φ − η ∇f_k(h_k, φ).

    h_k is the site's head, and φ ← Σ p_k φ_k is the shared body. Batch norm's running statistics belong to the body and
    do not change while the head is trained.
    """

    title = "FedRep"
    paper = "Collins et al. 2021"
    sends = "model without the last layer"
    extra_work = "10 additional passes that train only the last layer"
    suits = "hospitals with different class frequencies, if the last layer learns fast"

    name: Literal["fedrep"] = "fedrep"  # type: ignore[assignment]
    head_epochs: int = Field(
        10, ge=0, le=1000, description="epochs that train only the head, before the plan's epochs train only the body"
    )

    def train_round(self, context: TrainContext) -> float:
        model = context.modules["model"]
        head = set(head_names(model))
        body = {name for name, _ in model.named_parameters()} - head
        with learning_only(model, head), keeping_statistics(model):
            for number in range(self.head_epochs):
                # The head's epochs have negative numbers, so that the head gets the cases in other orders than the
                # body, whose epochs are numbered from 0.
                context.cases.epoch([context.train_step()], -1 - number)
        with learning_only(model, body):
            return context.train()
