"""The terms that all parties of a sealed study know: who takes part, and what is added."""

from dataclasses import dataclass
from functools import cached_property

from medsilo.core.errors import PlanError, Refused
from medsilo.core.tensors import Tensors
from medsilo_secagg.fixed_point import FixedPoint, Flat
from medsilo_secagg.streams import Words, digest

LEAST, MOST_SITES = 3, 256


@dataclass(frozen=True)
class Terms:
    """The agreement of a study, the same at the server and at every site.

    study, plan: its name and its plan's hash.
    sites: the hospitals, in sorted order. A hospital's place in it is its place in every round.
    threshold: how many hospitals open a sum.
    required: how many hospitals the plan wants in a sum, where that is more.
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
        """Bytes that stand for the terms."""
        return digest("terms", self.study, self.plan, *self.sites, self.threshold)

    @property
    def least(self) -> int:
        """Return how many hospitals must take part in a sum."""
        return max(self.threshold, self.required, LEAST)

    def place(self, site: str) -> int:
        """Return a site's place; raises Refused."""
        if site not in self.sites:
            raise Refused(f"{site}: not a site of this study")
        return self.sites.index(site)


@dataclass(frozen=True)
class SealedBlock:
    """Tensors that are masked and added as one, under a name that no other block of the round has."""

    name: str
    flat: Flat
    fixed: FixedPoint

    def read(self, words: Words, divisor: int = 1, weight: int | None = None) -> Tensors:
        """Return a sum whose masks are off, divided. weight: what the addends' weights add up to, if that is known.

        Raises Refused when the words are not such a sum.
        """
        return self.flat.decode(words, self.fixed, weight or self.fixed.weights, divisor)
