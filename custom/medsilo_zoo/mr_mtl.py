"""MR-MTL, mean-regularized multi-task learning: Liu et al., On Privacy and Personalization in Cross-Silo Federated
Learning, NeurIPS 2022."""

from typing import Literal

from pydantic import Field

from medsilo.extend.methods import MeanOfOwn, Private, TrainContext, Weighting, correcting, pull_back


class MRMTL(MeanOfOwn):
    """Sites minimise F_k(w_k) + λ/2 ‖w_k − w̄‖², each with a model of its own; w̄ ← Σ p_k w_k is their mean.

    λ = 0 is training alone; a large λ comes near FedAvg.
    """

    title = "MR-MTL"
    paper = "Liu et al. 2022"

    name: Literal["mr-mtl"] = "mr-mtl"
    weighting: Weighting = "uniform"
    pull: float = Field(
        0.1, ge=0, le=1000, description="λ: how strongly a site's own model is held near the mean of all; 0 is local"
    )

    def private(self) -> Private:
        return Private(("model",), disclosure_notes="the pull to the mean is added to the noisy gradient")

    def learn(self, bench: TrainContext) -> float:
        """w_k ← w_k − η (∇F_k(w_k) + λ (w_k − w̄)), with w̄ as it arrived."""
        own, mean = (list(bench.modules[name].parameters()) for name in ("model", "global"))
        with correcting(bench.optimizers["model"], pull_back(own, self.pull, to=mean)):
            return bench.train()
