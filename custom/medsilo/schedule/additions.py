"""Define two additions to any method: a shared amplitude spectrum of images, and perturbed training steps.

Both additions are from HarmoFL (Jiang et al., AAAI 2022). The exchange of amplitudes changes a method's phases, and the
perturbation replaces the step of the method's optimizer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from medsilo.core.section import Section
from medsilo.schedule.phase import Phase

if TYPE_CHECKING:
    from medsilo.learning.amplitude import AmplitudeNorm

INPUT = "amplitude"  # name of the input layer in a site's dictionary of networks


class Amplitude(Section):
    """Amplitude normalisation: Ψ of HarmoFL's Equations 2 to 4.

    An image keeps its phase spectrum, and its amplitude spectrum is replaced by an average over all sites' images.
    """

    decay: float = Field(
        0.1, ge=0, le=1, description="weight of a new batch in the amplitude's running average (v of Eq. 3)"
    )
    band: float | None = Field(
        None,
        ge=0,
        le=0.5,
        description="the frequencies at which images get the shared amplitude. `null`: all frequencies; 0: only the "
        "image's mean; up to 0.5: a square of low frequencies",
    )
    start: Literal["batch", "zero"] = Field(
        "batch",
        description="initial value of the amplitude's running average: the amplitude of the first batch, or zero",
    )
    measured: Literal["while-training", "before"] = Field(
        "while-training",
        description="`before`: sites measure the amplitude in a separate round, from the unchanged training "
        "images. A plan with `privacy` needs `before`; the fewer frequencies `band` includes, the smaller is the noise",
    )

    @property
    def released_alone(self) -> bool:
        """True if sites send the amplitude before training, because the privacy account can't charge an amplitude that
        changes in training.
        """
        return self.measured == "before"

    def layer(self, shape: Sequence[int]) -> "AmplitudeNorm":
        from medsilo.learning.amplitude import AmplitudeNorm

        return AmplitudeNorm(shape, self.decay, self.band, self.start)

    def over(self, phases: Sequence[Phase]) -> Sequence[Phase]:
        from medsilo.schedule.amplitude_phases import behind

        return behind(self, phases)


class Perturbation(Section):
    """Weight perturbation: δ of HarmoFL's Equations 6 and 7.

    The first of two passes over a batch finds nearby weights with a higher loss, and the second pass computes the
    gradient at these weights.
    """

    alpha: float = Field(0.05, gt=0, le=100, description="length of the perturbation")
