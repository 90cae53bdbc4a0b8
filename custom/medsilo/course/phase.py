"""Phases, and the course that they make together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from medsilo.core.tensors import Modules
from medsilo.course.group import Facts, Group
from medsilo.course.server_side import ServerSide
from medsilo.course.workbench import Workbench

# Who alone trains in a round: from its number, all hospitals in sorted order, and the plan's seed.
Turn = Callable[[int, Sequence[str], int], str]


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds in which the same groups travel and sites do the same work.

    >>> from medsilo.extend import Group, Phase
    >>> [group.name for group in Phase("train", 3, (Group("model", lambda own: own["model"].state_dict()),)).sent]
    ['model']
    """

    name: str
    rounds: int
    groups: tuple[Group, ...] = ()
    work: Callable[[Workbench], float] = Workbench.train  # at a site in a round; returns the loss, or NaN
    turn: Turn | None = None  # where only one trains and sends in a round; the others validate what they are given
    # What the server does before the phase: it may change initial weights that have not travelled yet, and returns
    # facts for the summary's details. It is not done again when a study is resumed.
    before: Callable[[ServerSide, Modules], Facts] | None = None
    trains: bool = True  # whether sites pass their training batches in it
    releases: int = 0  # means over its cases that a site lets out in a round, where the plan promises privacy
    says: tuple[str, ...] = ()  # what a hospital should know of the phase, one line each, for the leak report

    def trains_at(self, site: str, number: int, sites: Sequence[str], seed: int) -> bool:
        """Return whether a site trains, and sends what it has, in a round."""
        return self.turn is None or self.turn(number, sites, seed) == site

    @property
    def sent(self) -> tuple[Group, ...]:
        """The groups that sites send."""
        return tuple(group for group in self.groups if group.goes_up)

    @property
    def given(self) -> tuple[Group, ...]:
        """The groups that sites are given."""
        return tuple(group for group in self.groups if group.goes_down)

    @property
    def once(self) -> tuple[Group, ...]:
        """The groups that each site is given once and keeps."""
        return tuple(group for group in self.groups if group.travels == "down")


@dataclass(frozen=True)
class Stretch:
    """A phase in its place: the rounds `first` to `last`."""

    place: int
    first: int
    last: int
    phase: Phase


class Course:
    """All phases of a study by round, and the phase in which its outcome is delivered.

    A phase's name may come again later; what counts is its place.
    """

    def __init__(self, phases: Sequence[Phase], delivery: Phase) -> None:
        self.phases = tuple(phases)
        self.delivery = delivery
        self.rounds = sum(phase.rounds for phase in phases)

    def stretches(self) -> Iterator[Stretch]:
        """Yield the phases that have rounds, in order."""
        first = 1
        for place, phase in enumerate(self.phases):
            if phase.rounds:
                yield Stretch(place, first, first + phase.rounds - 1, phase)
            first += phase.rounds

    def place_of(self, number: int) -> int:
        """Return the place of a round's phase; after the last round that of the last phase, which may have none."""
        here = (stretch.place for stretch in self.stretches() if number <= stretch.last)
        return next(here, len(self.phases) - 1)

    def phase_of(self, number: int) -> Phase:
        """Return the phase that a round, counted from 1, belongs to."""
        return self.phases[self.place_of(number)]

    @property
    def last(self) -> Phase:
        """The phase after the last round."""
        return self.phases[-1]

    def has_travelled(self, rounds: int) -> bool:
        """Return whether all that the last phase gives was there in these rounds, so that the server holds it."""
        so_far = self.phases[: self.place_of(rounds) + 1]
        return {group.name for group in self.last.given} <= {group.name for phase in so_far for group in phase.groups}

    def used_as_scored(self, rounds: int) -> bool:
        """Return whether the model after so many rounds is used as it was scored; not before the last phase."""
        return self.phase_of(rounds + 1).name == self.last.name
