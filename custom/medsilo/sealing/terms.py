"""The terms that all parties of a sealed study know: who takes part, how sums are sealed, and what is added."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from medsilo.core.errors import PlanError, Refused
from medsilo.core.tensors import Tensors
from medsilo.sealing.fixed_point import BITS, FixedPoint, Flat
from medsilo.sealing.streams import Words, digest

LEAST, MOST_SITES = 3, 256

MOST_OF_REST = 0.9  # of a sum without its reader's own part that may be one other hospital's

SERVER = "@server"  # who reads a sum, and may tell all; else the name of a site


@dataclass(frozen=True)
class Terms:
    """The agreement of a study, the same at the server and at every site.

    study, plan: its name and its plan's hash.
    sites: the hospitals, in sorted order. A hospital's place in it is its place in every agreement.
    threshold: how many hospitals can take off what a dropout leaves.
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
            raise PlanError("sealing: the sites must be in sorted order, each once")
        if not LEAST <= count <= MOST_SITES:
            raise PlanError(
                f"sealing: {count} sites; it needs {LEAST} to {MOST_SITES}: of two hospitals, each can tell the "
                "other's model from the sum"
            )
        if not count < 2 * self.threshold <= 2 * count:
            raise PlanError(
                f"sealing: threshold {self.threshold}; for {count} sites it must be from {count // 2 + 1} to {count}: "
                "with half of them or fewer a server could have both of a hospital's masks taken off"
            )

    @cached_property
    def digest(self) -> bytes:
        """Bytes that stand for the terms."""
        return digest("terms", self.study, self.plan, *self.sites, self.threshold, self.required)

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
    """Numbers that are sealed and added as one.

    name: the group's, with what else tells it apart in a round.
    reader: who can read the sum: SERVER, which may tell it to all, or one site.
    weights: of each site's numbers, in the order of the sites, where they are public. A site multiplies by its own
        before it seals, by one of its own choice if there are none here.
    """

    name: str
    flat: Flat
    fixed: FixedPoint
    reader: str = SERVER
    weights: tuple[int, ...] | None = None

    @cached_property
    def digest(self) -> bytes:
        """Bytes that stand for what is added, and how."""
        flat, fixed = self.flat, self.fixed
        layout = [f"{n} {list(s)} {d}" for n, s, d in zip(flat.names, flat.shapes, flat.dtypes, strict=True)]
        numbers = (BITS, repr(float(fixed.bound)), fixed.weights, fixed.one)
        weights = ("private",) if self.weights is None else tuple(map(int, self.weights))
        return digest("block", self.name, self.reader, *numbers, len(layout), *layout, *weights)

    def read(self, words: Words, places: Collection[int], divisor: int | None = None) -> Tensors:
        """Return the sum of the sites at these places, whose masks are off, divided.

        divisor: what to divide by; by default what the public weights add up to, 1 where there are none. Raises Refused
            when the words are not such a sum.
        """
        weight = None if self.weights is None else sum(self.weights[place] for place in places)
        most = self.fixed.weights if weight is None or divisor is not None else weight
        return self.flat.decode(words, self.fixed, most, divisor or weight or 1)


def check_blocks(terms: Terms, blocks: Sequence[SealedBlock]) -> None:
    """Raise PlanError unless these blocks can be sealed under these terms, and Refused for wrong weights."""
    if not blocks or len({block.name for block in blocks}) != len(blocks):
        raise PlanError("sealing: a round seals at least one block, each under a name of its own")
    for block in blocks:
        if block.reader not in (SERVER, *terms.sites):
            raise PlanError(f"sealing: the sum of {block.name} cannot be for {block.reader}, who is not of the study")
        row, count, most = block.weights, len(terms.sites), block.fixed.weights
        if row is not None and (len(row) != count or min(row) < 0 or not 0 < sum(row) <= most):
            raise Refused(f"the weights of {block.name} must be {count} whole numbers that add up to 1 to {most}")


def check_hidden(terms: Terms, block: SealedBlock, places: Collection[int]) -> None:
    """Raise Refused where the sum of the sites at these places would tell a reader the model of one other hospital.

    A sum that the server may read is open to all: it may tell them.
    """
    row = block.weights or (1,) * len(terms.sites)
    for reader in range(len(terms.sites)) if block.reader == SERVER else (terms.place(block.reader),):
        others = [row[place] for place in places if place != reader]
        if max(others, default=0) > MOST_OF_REST * sum(others):
            raise Refused(
                f"the sum of {block.name} would tell a hospital the model of one other, whose weight is more than "
                f"{MOST_OF_REST:.0%} of all others' together"
            )
