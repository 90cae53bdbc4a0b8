"""HarmoFL: Jiang et al., HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous Medical
Images, AAAI 2022.

HarmoFL combines a common amplitude spectrum of all input images with perturbed gradient steps. A plan can also add the
amplitude spectrum or the perturbed steps to methods other than HarmoFL (schedule/additions.py).
"""

from typing import Literal

from pydantic import Field

from medsilo.methods.fedavg import Averaging
from medsilo.mixing.aggregators import Aggregator
from medsilo.schedule.additions import Amplitude, Perturbation
from medsilo.schedule.declared import Private
from medsilo.schedule.phase import ServerSide
from medsilo.schedule.weighting import Weighting


class HarmoFL(Averaging):
    """HarmoFL gives all images a common amplitude spectrum, and perturbs the weights to find flat minima.

    The objective is min_θ Σ p_i F_i(θ + δ, Ψ(D_i)) (Equation 1). HarmoFL without an amplitude spectrum and without
    perturbation is FedAvg.
    """

    title = "HarmoFL"
    paper = "Jiang et al. 2022"
    sends = "model, amplitude (in one round only); the amplitude is one average spectrum per channel"
    extra_work = "two gradients per batch, one Fourier transform per image"
    suits = "one shared model for hospitals whose stains or scanners differ"
    protocols = {
        # Settings of the paper's text without the text's misprints: the whole spectrum, and an average that starts at
        # zero.
        "paper": {
            "algorithm.amplitude.band": None,
            "algorithm.amplitude.decay": 0.1,
            "algorithm.amplitude.start": "zero",
            "algorithm.perturbation.alpha": 0.05,
            "algorithm.weighting": "uniform",
            "algorithm.server_lr": 1.0,
        },
        # HarmoFL's released code changes only the mean of each channel. HarmoFL's released code converts the decay 0.1
        # to the integer 0, so all rounds use the mean of the first batch. In HarmoFL's released code, batch norm has no
        # weights and no running statistics.
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
    server_lr: float = Field(
        1.0, gt=0, le=10, description="η: learning rate of the server's step along the sites' mean change"
    )

    def private(self) -> Private:
        return Private(("model",), disclosure_notes="each perturbed step has two noisy gradients, which both count")

    def mean(self, server: ServerSide, rate: float = 1.0) -> Aggregator:
        """Return the aggregator θ ← θ + η_g (Σ p_i θ_i − θ) (line 16 of Algorithm 1)."""
        return super().mean(server, self.server_lr)
