"""The two things that a plan may add to any method, HarmoFL's: inputs of one amplitude, and perturbed steps."""

from collections.abc import Sequence
from typing import Literal, cast

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from medsilo.core.section import Section
from medsilo.learning.amplitude import AmplitudeNorm, images_averaged
from medsilo.learning.perturbation import PerturbedOptimizer
from medsilo.learning.steps import Closure, Step
from medsilo.learning.training import Training


class Amplitude(Section):
    """Ψ of Eqs. 2 to 4: images keep their phase and take the amplitude spectrum that all sites share."""

    decay: float = Field(
        0.1, ge=0, le=1, description="weight of a new batch in the amplitude's running average (v of Eq. 3)"
    )
    band: float | None = Field(
        None,
        ge=0,
        le=0.5,
        description="which frequencies take the shared amplitude. `null`: all; 0: the mean alone; up to 0.5: a square "
        "of low frequencies",
    )
    start: Literal["batch", "zero"] = Field(
        "batch", description="the running average starts from the first batch, or from zero"
    )

    def layer(self, shape: Sequence[int]) -> AmplitudeNorm:
        """The layer for images [C, ...] of this shape."""
        return AmplitudeNorm(shape, self.decay, self.band, self.start)

    def averages(self, images: int, training: Training) -> int:
        """How many of a site's images its average covers after one round."""
        return images_averaged(images, training.batch_size, training.local_epochs, self.decay, self.start)


class Perturbation(Section):
    """δ of Eqs. 6 and 7: gradients are taken where the loss is worst nearby, in two passes over each batch."""

    alpha: float = Field(0.05, gt=0, le=100, description="length of the perturbation")

    def step(self, model: nn.Module, optimizer: Optimizer) -> Step:
        """Lines 9 to 12 of Alg. 1; the optimizer steps from the unperturbed weights."""
        perturbed = PerturbedOptimizer(optimizer, self.alpha, module=model)
        return lambda _, closure: perturbed.step(cast(Closure, closure))
