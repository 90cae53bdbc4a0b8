"""A study's promise of privacy. mechanisms.py has its releases; a hospital's settings have its demands."""

from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from medsilo.core.section import Section

Reason = Annotated[str, Field(min_length=1, max_length=200)]
Unit: TypeAlias = Literal["record", "patient"]
Epsilon = Annotated[float, Field(gt=0, le=1000)]
Delta = Annotated[float, Field(ge=1e-12, le=0.1)]
# The largest ε of a study at which noise replaces a hospital's floors; above it noise protects little, and both hold.
PROTECTIVE_EPSILON = 10.0


class Demands(Protocol):
    """The privacy that a hospital demands in its settings."""

    @property
    def epsilon(self) -> float: ...

    @property
    def delta(self) -> float: ...


class PrivacyGuarantee(Section):
    """A promise of one study: (ε, δ) for each unit, against everybody outside the hospital."""

    epsilon: Epsilon
    delta: Delta
    unit: Unit = "record"

    def suffices(self, demands: Demands | None) -> bool:
        """True if the noise of this promise replaces a hospital's own minimum counts: the hospital demands privacy, and
        ε is small enough.

        A lead's offer alone lowers no minimum.
        """
        return demands is not None and self.epsilon <= PROTECTIVE_EPSILON

    def under(self, demands: Demands | None) -> "PrivacyGuarantee":
        """The stricter of a study's promise and a hospital's demand, for each of ε, δ and unit."""
        if demands is None:
            return self
        epsilon, delta = min(self.epsilon, demands.epsilon), min(self.delta, demands.delta)
        return PrivacyGuarantee(epsilon=epsilon, delta=delta, unit="patient")
