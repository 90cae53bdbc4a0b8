"""Define a study's promise of differential privacy."""

from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from medsilo.core.section import Section

Reason = Annotated[str, Field(min_length=1, max_length=200)]
Unit: TypeAlias = Literal["record", "patient"]
Epsilon = Annotated[float, Field(gt=0, le=1000)]
Delta = Annotated[float, Field(ge=1e-12, le=0.1)]
# If ε is above this number, the noise of a study protects little, so a hospital's minimum counts apply in addition to
# the noise.
PROTECTIVE_EPSILON = 10.0


class Demands(Protocol):
    @property
    def epsilon(self) -> float: ...

    @property
    def delta(self) -> float: ...


class PrivacyGuarantee(Section):
    """A study's promise of (ε, δ) differential privacy for each privacy unit, against everybody outside the
    hospital.
    """

    epsilon: Epsilon
    delta: Delta
    unit: Unit = "record"

    def suffices(self, demands: Demands | None) -> bool:
        """Return True if noise replaces a hospital's minimum counts: that is, if the hospital demands privacy and ε is
        small.

        A lead's offer of privacy alone does not lower a hospital's minimum counts.
        """
        return demands is not None and self.epsilon <= PROTECTIVE_EPSILON

    def under(self, demands: Demands | None) -> "PrivacyGuarantee":
        if demands is None:
            return self
        epsilon, delta = min(self.epsilon, demands.epsilon), min(self.delta, demands.delta)
        return PrivacyGuarantee(epsilon=epsilon, delta=delta, unit="patient")
