"""MR-MTL, mean-regularized multi-task learning (Liu et al., On Privacy and Personalization in Cross-Silo Federated
Learning, NeurIPS 2022).
"""

from typing import Literal

from pydantic import Field

from medsilo.extend.methods import MeanOfOwn, Private, TrainContext, Weighting, correcting, pull_back


class MRMTL(MeanOfOwn):
    """Each site minimises F_k(w_k) + λ/2 ‖w_k − w̄‖² for its model w_k. The mean of all models is w̄ ← Σ p_k w_k.

    With λ = 0, each site trains alone. With a large λ, the method is close to FedAvg.
    """

    title = "MR-MTL"
    paper = "Liu et al. 2022"
    sends = "own model"
    suits = "differential privacy, because noise affects MR-MTL's models less than other models"

    name: Literal["mr-mtl"] = "mr-mtl"
    weighting: Weighting | None = "uniform"
    pull: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="λ: strength of the pull of a site's model to the mean of all models; with 0, each site trains "
        "alone",
    )

    def private(self) -> Private:
        return Private(("model",), disclosure_notes="the pull to the mean is added to the noisy gradient")

    def learn(self, context: TrainContext) -> float:
        """Update w_k ← w_k − η (∇F_k(w_k) + λ (w_k − w̄)), where w̄ is the received mean."""
        own, mean = (list(context.modules[name].parameters()) for name in ("model", "global"))
        with correcting(context.optimizers["model"], pull_back(own, self.pull, to=mean)):
            return context.train()
