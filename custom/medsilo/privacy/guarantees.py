"""What a study promises of privacy. mechanisms.py has what is released for it; a hospital demands in its settings."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from medsilo.core.section import Section

if TYPE_CHECKING:  # a hospital alone demands
    from medsilo.site.settings import PrivacyRequirements

Reason = Annotated[str, Field(min_length=1, max_length=200)]
Unit: TypeAlias = Literal["record", "patient"]
Epsilon = Annotated[float, Field(gt=0, le=1000)]
Delta = Annotated[float, Field(ge=1e-12, le=0.1)]
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
        """Return what holds where a study promises this and a hospital demands that, for its patients: of each the
        stricter."""
        if demands is None:
            return self
        epsilon, delta = min(self.epsilon, demands.epsilon), min(self.delta, demands.delta)
        return PrivacyGuarantee(epsilon=epsilon, delta=delta, unit="patient")
