"""A study's promise of differential privacy. The module mechanisms.py defines the noisy releases, and a hospital's
settings contain the hospital's demands.
"""

from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from medsilo.core.section import Section

Reason = Annotated[str, Field(min_length=1, max_length=200)]
Unit: TypeAlias = Literal["record", "patient"]
Epsilon = Annotated[float, Field(gt=0, le=1000)]
Delta = Annotated[float, Field(ge=1e-12, le=0.1)]
# The largest ε of a study at which noise replaces a hospital's minimum counts. Above this ε, noise protects little, so
# the minimum counts apply, too.
PROTECTIVE_EPSILON = 10.0


class Demands(Protocol):
    """The privacy that a hospital demands in its settings."""

    @property
    def epsilon(self) -> float: ...

    @property
    def delta(self) -> float: ...


class PrivacyGuarantee(Section):
    """A study's promise of (ε, δ) differential privacy for each unit, against everybody outside the hospital."""

    epsilon: Epsilon
    delta: Delta
    unit: Unit = "record"

    def suffices(self, demands: Demands | None) -> bool:
        """Return True if the noise of this promise replaces a hospital's minimum counts. The hospital must demand
        privacy, and ε must be small enough.

        A lead's offer alone does not lower minimum counts.
        """
        return demands is not None and self.epsilon <= PROTECTIVE_EPSILON

    def under(self, demands: Demands | None) -> "PrivacyGuarantee":
        """Return the stricter value of a study's promise and a hospital's demand, for each of ε, δ and unit."""
        if demands is None:
            return self
        epsilon, delta = min(self.epsilon, demands.epsilon), min(self.delta, demands.delta)
        return PrivacyGuarantee(epsilon=epsilon, delta=delta, unit="patient")
