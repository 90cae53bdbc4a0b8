"""Define the noise mechanisms by which a hospital releases results, and their parameters for privacy accounting.

Two data sets are neighbours if they differ in one privacy unit: one record, or one patient with all of the patient's
records. The sensitivity Δ of a release is the largest difference between the release's values for two neighbours. Δ₂
measures the difference as Euclidean length, and Δ₁ as the sum of absolute values.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field

from medsilo.core.section import Section
from medsilo.privacy.guarantees import Reason

MOST_NOISE, MOST_COUNT, MOST_CHANGE = 1e6, 10**7, 1000
Noise = Annotated[float, Field(ge=1e-3, le=MOST_NOISE)]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]


class Gaussian(Section):
    """Normal noise on a result that is computed from all records."""

    kind: Literal["gaussian"] = "gaussian"
    noise: Noise = Field(description="the noise multiplier σ / Δ₂ for one privacy unit")
    count: Count = 1  # number of releases that use this noise


class SampledGaussian(Section):
    """Normal noise on a sum over a Poisson sample of privacy units, where the contribution of each unit is clipped."""

    kind: Literal["sampled-gaussian"] = "sampled-gaussian"
    noise: Noise = Field(description="the noise multiplier σ / Δ₂ for one sampled privacy unit")
    rate: float = Field(gt=0, le=1, description="probability that a privacy unit is in a step's sample")
    steps: Count


class Geometric(Section):
    """Two-sided geometric (discrete Laplace) noise on an integer: P(k) ∝ exp(-|k| / (scale · sensitivity))."""

    kind: Literal["geometric"] = "geometric"
    scale: Noise = Field(description="scale of the noise, divided by the sensitivity")
    sensitivity: int = Field(
        1, ge=1, le=MOST_CHANGE, description="largest change of the number that one privacy unit can cause"
    )
    count: Count = 1


class Public(Section):
    """A number that the hospital declared public in writing, so that it is released without noise and without a
    charge.
    """

    kind: Literal["public"] = "public"
    reason: Reason


Mechanism: TypeAlias = Annotated[Gaussian | SampledGaussian | Geometric | Public, Field(discriminator="kind")]


class Charge(Section):
    """A release and its mechanism, for example "weights of phase train, round 3" and SampledGaussian(...)."""

    what: Reason
    of: Mechanism

    @classmethod
    def normal(cls, purpose: str, noise: float, count: int = 1) -> Self:
        """Return the charge of a result that is computed from all records and released with normal noise.

        Args:
            noise: the noise multiplier σ / Δ₂ for one privacy unit
        """
        return cls(what=purpose, of=Gaussian(noise=noise, count=count))
