"""A method as data: phases of groups of tensors, and what it finds at a site and at the server."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.layers import batch_norm_buffer_names
from medsilo.learning.training import Training
from medsilo.mixing.forms import Mean
from medsilo.tasks.task import Task

if TYPE_CHECKING:  # only the server mixes, and only a site trains
    from medsilo.learning.compute import Compute
    from medsilo.mixing.mixers import Aggregator
    from medsilo.schedule.train_context import TrainContext
    from medsilo.tasks.sources import DataSource


@dataclass(frozen=True)
class ModelFactory:
    """Makes the plan's network, as often as called; knows the shape of one case, where all have the same."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None
    channels: int
    sites: Sequence[str]  # that train, in sorted order; as many as the plan needs, where it names none

    def __call__(self) -> nn.Module:
        return self.make()


@dataclass(frozen=True)
class ServerSide:
    """The sites, what came of the groups so far, and the server's own means. Mappings and sets are live views."""

    sites: Sequence[str]  # that train, in sorted order
    mixers: Mapping[str, "Aggregator"]  # of the phases before, and of this phase's groups that were declared earlier
    joined: Mapping[str, Any]  # what every site joined with
    contributed: Callable[[], Set[str]]  # sites that have answered in a round
    task: Task
    training: Training
    seed: int
    compute: "Callable[[], Compute]"
    data: "DataSource | None"  # the server's own
    stop: Callable[[], None]  # raises when the run was told to stop

    def sharing(self) -> Set[str]:
        """Return the sites that let each other have their personal models.

        The model of a site that was to train and never did is nobody's expert.
        """
        absent = set(self.sites) - self.contributed()
        return {site for site, answer in self.joined.items() if answer.shares and site not in absent}


sample_mean, site_mean = Mean.OF_CASES, Mean.OF_SITES
Facts = dict[str, Any]  # values that JSON can hold
Ranges = Mapping[str, tuple[float, float]]
FURTHEST = 1e4  # times the largest value of a task's inputs: no layer of a trained network gets larger ones


def without(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensors:
    """Return the tensors that are not named."""
    kept_back = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in kept_back}


def network(name: str, but: Callable[[nn.Module], Sequence[str]] = lambda model: ()) -> Callable[[Modules], Tensors]:
    """Return the view of all tensors of one of a site's networks, but for those that are named of it."""
    return lambda modules: without(modules[name].state_dict(), but(modules[name]))


def statistics_ranges(modules: Modules, task: Task) -> Ranges:
    """Return the ranges of running statistics: the layers' inputs are at most FURTHEST times the task's."""
    furthest = FURTHEST * max(1.0, task.largest_input)
    of = {"running_mean": (-furthest, furthest), "running_var": (0.0, furthest**2)}
    names = [name for module in modules.values() for name in batch_norm_buffer_names(module)]
    return {name: of[kind] for name in names for kind in of if name.endswith(kind)}


@dataclass(frozen=True)
class Average:
    """An average over a site's training images, which a hospital lets out of enough images only."""

    of: str  # for the disclosure report
    covers: Callable[[int, Training], int]  # how many of so many images it covers


@dataclass(frozen=True)
class Group:
    """Tensors that travel together and are mixed alike.

    Groups of a phase are added and merged in the order in which they are declared, so that the mixing of a group may
    look at the earlier ones: `mix` finds their mixers in `server.mixers`.

    >>> import torch
    >>> head = Group("head", lambda modules: dict(modules["model"][-1].named_parameters()), travels="up")
    >>> sorted(head.of({"model": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))}))
    ['bias', 'weight']
    """

    name: str
    of: Callable[[Modules], Tensors]  # a view into a site's networks, never a copy
    mix: Mean | Callable[[ServerSide], "Aggregator"] = sample_mean
    # down: each site gets the group once in a phase and keeps it. up: sites send it and get nothing back.
    travels: Literal["both", "up", "down"] = "both"
    personal: bool = False  # every site is given values of its own
    title: str = ""  # for tables of what leaves a site; by default the name
    fallback_group: str | None = None  # of a personal group: the group that a site without values of its own is given
    # Of a group that hands on single sites' own values: what a site makes of it where these are sealed, so that nothing
    # of it travels. It is told the site's place among those that train, None for others.
    apply_locally: Callable[[Modules, int | None], None] | None = None
    undefended: str = ""  # of a mean that no robust rule can take the place of: why, and what to use instead
    # The least and greatest value that its tensors may have, by name; asked once, with networks without values.
    ranges: Callable[[Modules, Task], Ranges] = statistics_ranges
    # Raises Refused when values that have the right form and range are impossible.
    check: Callable[[Tensors], object] = lambda tensors: None
    # Called at a site when a phase's groups have arrived, with whether this one was among them. May raise Refused.
    arrived: Callable[[Modules, bool], None] = lambda modules, came: None
    # What the server found out about the sites when all is done, for the summary's details.
    site_details: Callable[["Aggregator", Sequence[str]], Facts] = lambda mixer, sites: {}
    # What else a hospital should know of the group, one line each, for the disclosure report.
    disclosure_notes: Callable[[Tensors], Sequence[str]] = lambda tensors: ()
    average: Average | None = None  # if tensors are one
    unclipped: bool = False  # where sites seal: numbers may be as large as their range, not only as the plan's bound

    def given_only(self) -> Self:
        """Return the same group as sites get it when its networks are done."""
        return replace(self, travels="down")

    @property
    def goes_up(self) -> bool:
        """Return whether sites send it."""
        return self.travels != "down"

    @property
    def goes_down(self) -> bool:
        """Return whether sites are given it."""
        return self.travels != "up"


def views(groups: Sequence[Group], modules: Modules) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of these groups in a site's networks. A group without any does not travel."""
    found = {group.name: group.of(modules) for group in groups}
    return {name: tensors for name, tensors in found.items() if tensors}


def places_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return where tensors lie in memory, by which another view of the same tensor is recognised."""
    return {tensor.data_ptr() for tensor in tensors}


# Who alone trains in a round: from its number, all hospitals in sorted order, and the plan's seed.
Turn = Callable[[int, Sequence[str], int], str]


@dataclass(frozen=True)
class Phase:
    """Rounds in succession in which the same groups travel and sites do the same work.

    >>> from medsilo.extend import Group, Phase
    >>> [group.name for group in Phase("train", 3, (Group("model", lambda own: own["model"].state_dict()),)).sent]
    ['model']
    """

    name: str
    rounds: int
    groups: tuple[Group, ...] = ()
    work: Callable[["TrainContext"], float] = lambda bench: (
        bench.train()
    )  # at a site in a round; returns the loss, or NaN
    turn: Turn | None = None  # where only one trains and sends in a round; the others validate what they are given
    # What the server does before the phase: it may change initial weights that have not travelled yet, and returns
    # facts for the summary's details. It is not done again when a study is resumed.
    before: Callable[[ServerSide, Modules], Facts] | None = None
    trains: bool = True  # whether sites pass their training batches in it
    releases: int = 0  # means over its cases that a site lets out in a round, where the plan promises privacy
    disclosure_notes: tuple[
        str, ...
    ] = ()  # what a hospital should know of the phase, one line each, for the disclosure report

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
class Segment:
    """A phase in its place: the rounds `first` to `last`."""

    place: int
    first: int
    last: int
    phase: Phase


class Schedule:
    """All phases of a study by round, and the phase in which its outcome is delivered.

    A phase's name may come again later; what counts is its place.
    """

    def __init__(self, phases: Sequence[Phase], delivery: Phase) -> None:
        self.phases = tuple(phases)
        self.delivery = delivery
        self.rounds = sum(phase.rounds for phase in phases)

    def stretches(self) -> Iterator[Segment]:
        """Yield the phases that have rounds, in order."""
        first = 1
        for place, phase in enumerate(self.phases):
            if phase.rounds:
                yield Segment(place, first, first + phase.rounds - 1, phase)
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
