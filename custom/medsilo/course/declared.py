"""The declarations that a method makes about its training under a plan with privacy, and the plan's offer."""

import math
from dataclasses import dataclass

from pydantic import Field

from medsilo.core.errors import PlanError
from medsilo.learning.private import AdaptiveClipping
from medsilo.privacy.agreed import Delta, Epsilon, Promise, Unit


@dataclass(frozen=True)
class Private:
    """A method's networks that learn by noisy steps, and why nothing else of a case leaves.

    All networks learn from the same sampled cases, so that their noisy gradients count together. What the noisy weights
    are used for afterwards costs nothing: averages, pulls, momentum, moments.
    """

    networks: tuple[str, ...]  # learn by noisy steps
    # Learn by exact steps: nothing of them leaves, and nothing of them reaches a network that leaves.
    at_home: tuple[str, ...] = ()
    says: str = "everything that leaves follows from noisy gradients"


class PrivacyOffer(Promise):
    """The plan's `privacy`: what the study promises every hospital of its records."""

    epsilon: Epsilon = Field(description="ε of all rounds together, at every hospital; it may demand less")
    delta: Delta = Field(description="δ at which ε holds; less than 1 / number of patients of the largest hospital")
    unit: Unit = Field("record", description="whom it protects: a record, or a patient with all cases")
    clip: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="length to which the gradient of a unit is cut: of a record, or of a patient's cases together",
    )
    adaptive: AdaptiveClipping | None = Field(
        None, description="`{}`: the length follows a quantile of the gradients' lengths, beginning with `clip`"
    )

    def noise(self, effective: float, gradients: int) -> float:
        """Return the noise on each gradient, over the bound, where so many of each batch must cost together as one with
        the noise `effective` would. Raises PlanError where counts of clipped gradients cost all of that by themselves.
        """
        left = 1 / (gradients * effective**2)
        if self.adaptive:
            left -= 1 / self.adaptive.multiplier**2
        if left <= 0:
            raise PlanError(
                f"privacy.adaptive.noise: the counts alone would cost more than ε = {self.epsilon:g}; raise it above "
                f"{effective * math.sqrt(gradients) / 2:.3g}"
            )
        return 1 / math.sqrt(left)

    def effective(self, noise: float, gradients: int) -> float:
        """Return the noise that one gradient of each batch would have, if it cost what all of them cost together."""
        each = 1 / noise**2 + (1 / self.adaptive.multiplier**2 if self.adaptive else 0.0)
        return 1 / math.sqrt(gradients * each)


ABLE = ("fedavg", "fedprox", "fedbn", "fedper", "ditto", "mr-mtl", "harmofl", "fedsm")  # that declare an account


def not_declared(method: str) -> str:
    """Return why a method that has no account can't keep a promise."""
    return (
        f"privacy: not all that leaves a hospital under {method} follows from noisy gradients, so the promise would be "
        f"false; use {', '.join(ABLE)}, or leave privacy out"
    )
