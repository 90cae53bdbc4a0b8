"""The two things that a plan may add to any method: inputs of one amplitude, and perturbed steps.

Both are of Jiang et al., AAAI 2022, whose equations and lines of Alg. 1 are named here. The first is a function over a
method's phases, the second takes the place of its optimizer's step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from medsilo.core import optional
from medsilo.core.section import Section
from medsilo.schedule.phase import Phase

if TYPE_CHECKING:
    from medsilo.learning.amplitude import AmplitudeNorm

INPUT = "amplitude"  # the name of the input layer among a site's networks


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
    measured: Literal["while-training", "before"] = Field(
        "while-training",
        description="`before`: in a round of its own, from the training images as they are. A plan with `privacy` "
        "needs that; a narrow `band` then keeps the noise small",
    )

    @property
    def released_alone(self) -> bool:
        """Return whether it leaves before training, in a way that has an account."""
        return self.measured == "before"

    def layer(self, shape: Sequence[int]) -> "AmplitudeNorm":
        """Return the layer that every batch of images of this shape passes once before a network sees it."""
        return optional.AmplitudeNorm(shape, self.decay, self.band, self.start)

    def over(self, phases: Sequence[Phase]) -> Sequence[Phase]:
        """Return a method's phases behind the input layer (amplitude_phases.py)."""
        return optional.behind(self, phases)


class Perturbation(Section):
    """δ of Eqs. 6 and 7: gradients are taken where the loss is worst nearby, in two passes over each batch."""

    alpha: float = Field(0.05, gt=0, le=100, description="length of the perturbation")
