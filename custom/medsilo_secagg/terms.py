"""Define the terms of a study with secure aggregation: the participants, the threshold, and the numbers to add."""

from dataclasses import dataclass
from functools import cached_property

from medsilo.core.errors import PlanError, Refused
from medsilo.core.tensors import Tensors
from medsilo_secagg.fixed_point import FixedPoint, Flat
from medsilo_secagg.streams import Words, digest

LEAST, MOST_SITES = 3, 256


@dataclass(frozen=True)
class Terms:
    """The terms of a study, which are the same at the server and at every site.

    Args:
        plan: The hash of the study's plan.
        sites: The hospitals in sorted order. A hospital has the same position in every round.
        threshold: The number of hospitals that must help to unmask a sum.
    """

    study: str
    plan: str
    sites: tuple[str, ...]
    threshold: int
    required: int = LEAST

    def __post_init__(self) -> None:
        count = len(self.sites)
        if list(self.sites) != sorted(set(self.sites)):
            raise PlanError("secure aggregation: the sites must be in sorted order, each once")
        if not LEAST <= count <= MOST_SITES:
            raise PlanError(
                f"secure aggregation: {count} sites; it needs {LEAST} to {MOST_SITES}, because each of two hospitals "
                f"can calculate the other's model from the sum"
            )
        if not count < 2 * self.threshold <= 2 * count:
            raise PlanError(
                f"secure aggregation: threshold {self.threshold}; for {count} sites it must be {count // 2 + 1} to "
                f"{count}, so that no two different sums of a round can be opened"
            )

    @cached_property
    def digest(self) -> bytes:
        return digest("terms", self.study, self.plan, *self.sites, self.threshold)

    @property
    def least(self) -> int:
        return max(self.threshold, self.required, LEAST)

    def place(self, site: str) -> int:
        """Return a site's position among the sorted sites; raise Refused for an unknown site."""
        if site not in self.sites:
            raise Refused(f"{site}: not a site of this study")
        return self.sites.index(site)


@dataclass(frozen=True)
class SealedBlock:
    """A block of tensors that are masked and added together, with a name that is unique in a round."""

    name: str
    flat: Flat
    fixed: FixedPoint

    def read(self, words: Words, divisor: int = 1, weight: int | None = None) -> Tensors:
        """Decode an unmasked sum, and divide the decoded numbers by the divisor; raise Refused if the integers cannot
        be a sum of encoded numbers.

        Args:
            weight: The sum of the weights of all sites in the sum, or None for the largest possible sum.
        """
        return self.flat.decode(words, self.fixed, weight or self.fixed.weights, divisor)
