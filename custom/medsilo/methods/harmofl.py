"""HarmoFL: Jiang et al., HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous Medical
Images, AAAI 2022. Lines of Alg. 1 are the paper's.

Both halves, inputs of one amplitude and perturbed steps, may be added to any other method, too:
`schedule/additions.py`.
"""

from typing import Literal

from pydantic import Field

from medsilo.methods.fedavg import Averaging
from medsilo.mixing.mixers import Aggregator
from medsilo.schedule.additions import Amplitude, Perturbation
from medsilo.schedule.declared import Private
from medsilo.schedule.phase import ServerSide
from medsilo.schedule.weighting import Weighting


class HarmoFL(Averaging):
    """min_θ Σ p_i F_i(θ + δ, Ψ(D_i)): inputs of one amplitude, and weights whose neighbourhood is flat (Eq. 1).

    Both halves are on unless switched off. Without them this is FedAvg.
    """

    title = "HarmoFL"
    paper = "Jiang et al. 2022"
    protocols = {
        # The paper's text, its misprints repaired: the whole spectrum, an average that comes from zero.
        "paper": {
            "algorithm.amplitude.band": None,
            "algorithm.amplitude.decay": 0.1,
            "algorithm.amplitude.start": "zero",
            "algorithm.perturbation.alpha": 0.05,
            "algorithm.weighting": "uniform",
            "algorithm.server_lr": 1.0,
        },
        # The released code computes only the mean of each channel, from the first batch of round 1 for ever, because it
        # cuts its decay of 0.1 to the whole number 0. Its batch norm has no weights and no running statistics.
        "released-code": {
            "algorithm.amplitude.band": 0.0,
            "algorithm.amplitude.decay": 0.0,
            "algorithm.amplitude.start": "batch",
            "algorithm.perturbation.alpha": 0.05,
            "algorithm.weighting": "uniform",
            "algorithm.server_lr": 1.0,
            "network.norm": "batch-statistics",
        },
    }

    name: Literal["harmofl"] = "harmofl"
    amplitude: Amplitude | None = Amplitude()
    perturbation: Perturbation | None = Perturbation()
    weighting: Weighting | None = "uniform"
    server_lr: float = Field(1.0, gt=0, le=10, description="the server's step along the sites' mean change (η)")

    def private(self) -> Private:
        return Private(("model",), disclosure_notes="both gradients of a perturbed step are noisy, and both count")

    def mean(self, server: ServerSide, rate: float = 1.0) -> Aggregator:
        """Return line 16 of Alg. 1: θ ← θ + η_g (Σ p_i θ_i − θ)."""
        return super().mean(server, self.server_lr)
