"""HarmoFL: Jiang et al., HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous Medical
Images, AAAI 2022. Equations and lines of Alg. 1 are the paper's."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from pydantic import Field
from torch import nn

from medsilo.algorithms.base import Blueprint, Groups, Modules, Phase, Workbench
from medsilo.algorithms.fedavg import Averaging
from medsilo.errors import PlanError, Refused
from medsilo.learning.amplitude import AmplitudeNorm, images_averaged
from medsilo.learning.perturbation import PerturbedOptimizer
from medsilo.learning.steps import Closure, Step
from medsilo.learning.training import Training
from medsilo.mixing.mixers import Mixer, UniformMean, WeightedMean

HARMONISE, TRAIN = "harmonise", "train"


class HarmoFL(Averaging):
    """min_θ Σ p_i F_i(θ + δ, Ψ(D_i)): inputs of one amplitude, and weights whose neighbourhood is flat (Eq. 1).

    Amplitudes leave the sites in round 1 only. Their mean comes down once and is fixed from then on; in round 1 every
    site normalises with its own. Without both switches this is FedAvg.
    """

    title = "HarmoFL"
    paper = "Jiang et al. 2022"
    travels = "model; amplitude in round 1 only"
    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # The paper's text, its misprints repaired: the whole spectrum, an average that comes from zero.
        "paper": {
            "algorithm.band": None,
            "algorithm.decay": 0.1,
            "algorithm.start": "zero",
            "algorithm.alpha": 0.05,
            "algorithm.weighting": "uniform",
            "algorithm.server_lr": 1.0,
        },
        # What the released code computes: the mean of each channel alone, from the first batch of round 1 for ever
        # (its decay of 0.1 is cut to the whole number 0), and batch norm without weights and running statistics.
        "released-code": {
            "algorithm.band": 0.0,
            "algorithm.decay": 0.0,
            "algorithm.start": "batch",
            "algorithm.alpha": 0.05,
            "algorithm.weighting": "uniform",
            "algorithm.server_lr": 1.0,
            "network.norm": "batch-statistics",
        },
    }

    name: Literal["harmofl"] = "harmofl"
    weighting: Literal["samples", "uniform"] = "uniform"
    alpha: float = Field(0.05, gt=0, le=100)  # length of the perturbation
    decay: float = Field(0.1, ge=0, le=1)  # v of Eq. 3
    # Frequencies that take the shared amplitude: null all, 0.0 the mean alone, up to 0.5 the square of low ones.
    band: float | None = Field(None, ge=0, le=0.5)
    start: Literal["batch", "zero"] = "batch"
    server_lr: float = Field(1.0, gt=0, le=10)  # η_g
    amplitude: bool = True
    perturbation: bool = True

    def phases(self, training: Training) -> Sequence[Phase]:
        if not self.amplitude:
            return super().phases(training)
        return [Phase(HARMONISE, 1), Phase(TRAIN, training.rounds - 1)]

    def networks(self, build: Blueprint) -> Modules:
        modules = super().networks(build)
        if self.amplitude:
            if build.shape is None:
                raise PlanError(f"algorithm.name: {self.name} needs images of one size; set task.size")
            modules["amplitude"] = AmplitudeNorm(build.shape, self.decay, self.band, self.start)
        return modules

    def input_layer(self, modules: Modules) -> nn.Module | None:
        return modules.get("amplitude")

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        return super().shared(modules, phase) | (_amplitude(modules) if phase == HARMONISE else {})

    def given(self, modules: Modules, phase: str) -> Groups:
        return self.shared(modules, phase) | (_amplitude(modules) if self.amplitude else {})

    def received(self, modules: Modules, groups: Collection[str], phase: str) -> None:
        if not self.amplitude or phase != TRAIN:
            return
        norm = cast(AmplitudeNorm, modules["amplitude"])
        if "amplitude" in groups:
            norm.forget_unused()
            norm.freeze(norm.amplitude)
        elif not norm.frozen:
            raise Refused("this site has lost the amplitude that all sites share; it is sent with the next request")

    def averages(self, images: int, training: Training) -> int | None:
        if not self.amplitude:
            return None
        return images_averaged(images, training.batch_size, training.local_epochs, self.decay, self.start)

    # How it is merged
    def mixer(self, group: str, earlier: Mapping[str, Mixer], sites: Sequence[str]) -> Mixer:
        if group == "amplitude":
            return UniformMean()  # line 17
        mean = WeightedMean if self.weighting == "samples" else UniformMean
        return mean(rate=self.server_lr)  # line 16

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        return bench.train(bench.lesson(step=self._perturbed_step(bench))) if self.perturbation else bench.train()

    def _perturbed_step(self, bench: Workbench) -> Step:
        """Lines 9 to 12: two passes over each batch, which Ψ has seen once."""
        optimizer = PerturbedOptimizer(bench.optimizers["model"], self.alpha, module=bench.modules["model"])
        return lambda _, closure: optimizer.step(cast(Closure, closure))


def _amplitude(modules: Modules) -> Groups:
    """What of the amplitude is used, so that nothing else leaves a site."""
    return {"amplitude": {"amplitude": cast(AmplitudeNorm, modules["amplitude"]).used}}
