"""Releases of a hospital's records, as far as an account needs to know them.

Two data sets are neighbours when one has one unit more: one record, or one patient with all records. A
sensitivity Δ is the most that this moves what is released (Δ₂ in Euclidean length, Δ₁ in sum of absolute values).
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field

from medsilo.core.section import Section

MOST_NOISE, MOST_COUNT, MOST_CHANGE = 1e6, 10**7, 1000
Noise = Annotated[float, Field(ge=1e-3, le=MOST_NOISE)]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Reason = Annotated[str, Field(min_length=1, max_length=200)]


class Gaussian(Section):
    """Normal noise on what was computed from all records."""

    kind: Literal["gaussian"] = "gaussian"
    noise: Noise = Field(description="σ / Δ₂, for one unit")
    count: Count = 1  # such releases


class SampledGaussian(Section):
    """Normal noise on a sum over a Poisson sample: every unit is drawn by itself, in every step, and clipped as one."""

    kind: Literal["sampled-gaussian"] = "sampled-gaussian"
    noise: Noise = Field(description="σ / Δ₂, for one drawn unit")
    rate: float = Field(gt=0, le=1, description="chance of a unit to be in a step's sample")
    steps: Count


class Geometric(Section):
    """Two-sided geometric (discrete Laplace) noise on a whole number: P(k) ∝ exp(-|k| / (scale · sensitivity))."""

    kind: Literal["geometric"] = "geometric"
    scale: Noise = Field(description="scale of the noise / sensitivity, for one unit")
    sensitivity: int = Field(1, ge=1, le=MOST_CHANGE, description="most that one unit changes the number")
    count: Count = 1


class Public(Section):
    """Something that the hospital declared public in writing: it costs nothing, and nothing is promised of it."""

    kind: Literal["public"] = "public"
    reason: Reason


Mechanism: TypeAlias = Annotated[Gaussian | SampledGaussian | Geometric | Public, Field(discriminator="kind")]


class Charge(Section):
    """One thing that leaves, and what it tells: "weights of phase train, round 3" by SampledGaussian(...)."""

    what: Reason
    of: Mechanism

    @classmethod
    def normal(cls, what: str, noise: float, count: int = 1) -> Self:
        """Return the charge of normal noise on something computed from all records. noise: σ / Δ₂, for one unit."""
        return cls(what=what, of=Gaussian(noise=noise, count=count))


Unit: TypeAlias = Literal["record", "patient"]
Epsilon = Annotated[float, Field(gt=0, le=1000)]
Delta = Annotated[float, Field(ge=1e-12, le=0.1)]
# What may leave beside tensors: numbers of cases; losses and scores over a part of the cases.
Told: TypeAlias = Literal["counts", "train", "validation", "test"]
# The largest ε of a study at which noise replaces a hospital's floors; above it noise protects little, and both hold.
PROTECTIVE_EPSILON = 10.0


class PrivacyGuarantee(Section):
    """A promise of one study: (ε, δ) for each unit, against everybody outside the hospital."""

    epsilon: Epsilon
    delta: Delta
    unit: Unit = "record"

    def suffices(self, demands: "PrivacyRequirements | None") -> bool:
        """Return whether noise that keeps this promise stands in the place of a hospital's own floors: where the
        hospital itself demands privacy, and ε is small enough. A lead's offer alone lowers nothing."""
        return demands is not None and self.epsilon <= PROTECTIVE_EPSILON

    def under(self, demands: "PrivacyRequirements | None") -> "PrivacyGuarantee":
        """Return what holds where a study promises this and a hospital demands that: of each the stricter."""
        if demands is None:
            return self
        most = demands.epsilon if demands.study_epsilon is None else min(demands.epsilon, demands.study_epsilon)
        unit: Unit = "patient" if "patient" in (self.unit, demands.unit) else "record"
        return PrivacyGuarantee(epsilon=min(self.epsilon, most), delta=min(self.delta, demands.delta), unit=unit)


class PrivacyRequirements(Section):
    """`privacy` in a hospital's medsilo.yaml: what it demands of every study, and of all together."""

    epsilon: Epsilon = Field(description="ε that all studies on the same data may cost together")
    delta: Delta = Field(description="δ at which that ε is counted; less than 1 / number of patients")
    study_epsilon: Epsilon | None = Field(None, description="ε that one study may cost; null: all that is left")
    unit: Unit = Field("patient", description="whom it protects: a patient with all cases, or a single record")
    public: dict[Told, Reason] = Field(
        {},
        description="what this hospital declares public, each with the reason: it costs nothing then. `counts`: "
        "numbers of cases and of patients; `train`, `validation`, `test`: scores and losses over these cases",
    )
