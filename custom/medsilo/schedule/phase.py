"""Define the phases of a study, and the groups of tensors that sites and the server exchange in each phase."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from medsilo.core.tensors import Modules, Tensors
from medsilo.learning.layers import batch_norm_buffer_names
from medsilo.learning.training import Training
from medsilo.mixing.mean_forms import Mean
from medsilo.tasks.task import Task

# imported only for type checkers: the server does not need the modules for training, and sites do not need the modules
# for aggregation
if TYPE_CHECKING:
    from medsilo.learning.compute import Compute
    from medsilo.mixing.aggregators import Aggregator
    from medsilo.schedule.train_context import TrainContext
    from medsilo.tasks.sources import DataSource


@dataclass(frozen=True)
class ModelFactory:
    """Makes a new instance of the plan's network each time the object is called.

    The attribute `shape` is the shape of each case, or None if the shapes of cases differ.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None
    channels: int
    # the sorted names of the training sites, or placeholders if the plan names no sites
    sites: Sequence[str]

    def __call__(self) -> nn.Module:
        return self.make()


@dataclass(frozen=True)
class ServerSide:
    """The server's side of a method: sites' names, aggregators, training data and computing device."""

    sites: Sequence[str]  # the training sites, sorted
    # By tensor group, the aggregators of the groups of earlier phases, and of the groups declared before in this phase.
    aggregators: Mapping[str, "Aggregator"]
    joined: Mapping[str, Any]  # each site's answer to the request "join"
    contributed: Callable[[], Set[str]]  # a function that returns the sites that have contributed to at least one round
    task: Task
    training: Training
    seed: int
    compute: "Callable[[], Compute]"
    data: "DataSource | None"
    stop: Callable[[], None]  # a function that raises an error if the run should stop

    def sharing(self) -> Set[str]:
        """Return the sites that share their personal models; a site that never contributed to a round has no model and
        is left out.
        """
        absent = set(self.sites) - self.contributed()
        return {site for site, answer in self.joined.items() if answer.shares and site not in absent}


sample_mean, site_mean = Mean.OF_CASES, Mean.OF_SITES
Facts = dict[str, Any]  # JSON values
Ranges = Mapping[str, tuple[float, float]]
# Largest activation of a trained network, as a multiple of the task's largest input.
FURTHEST = 1e4


def without(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensors:
    kept_back = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in kept_back}


def network(name: str, but: Callable[[nn.Module], Sequence[str]] = lambda model: ()) -> Callable[[Modules], Tensors]:
    """Return a function that returns the tensors of a network.

    >>> sorted(network("model")({"model": nn.Linear(2, 1)}))
    ['bias', 'weight']

    Args:
        name: the network's name
        but: a function that returns the names of tensors to leave out; by default, no tensor is left out
    """
    return lambda modules: without(modules[name].state_dict(), but(modules[name]))


def statistics_ranges(modules: Modules, task: Task) -> Ranges:
    """Return the range of valid values for each running mean and variance of batch norms.

    The ranges assume that an activation is at most FURTHEST times the task's largest input.
    """
    furthest = FURTHEST * max(1.0, task.largest_input)
    of = {"running_mean": (-furthest, furthest), "running_var": (0.0, furthest**2)}
    names = [name for module in modules.values() for name in batch_norm_buffer_names(module)]
    return {name: of[kind] for name in names for kind in of if name.endswith(kind)}


@dataclass(frozen=True)
class Average:
    """An average over a site's training images; the site sends the average only if the average covers enough images."""

    of: str  # words that describe the average over images to readers of the disclosure report
    # A function that returns the number of images that the average covers.
    covers: Callable[[int, Training], int]


@dataclass(frozen=True)
class Group:
    """A group of tensors that sites and the server exchange together, and that one aggregator combines.

    The server aggregates the tensor groups of a phase in order, so a group's aggregator may use the aggregators of
    earlier groups.

    >>> import torch
    >>> head = Group("head", lambda modules: dict(modules["model"][-1].named_parameters()), travels="up")
    >>> sorted(head.of({"model": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))}))
    ['bias', 'weight']
    """

    name: str
    of: Callable[[Modules], Tensors]  # a function that returns views of a site's networks, never copies
    mix: Mean | Callable[[ServerSide], "Aggregator"] = sample_mean
    # "both": sites send and receive the tensor group in every round. "down": each site receives the tensor group once
    # in a phase, and does not send it. "up": sites send the tensor group, and do not receive it. "given": sites receive
    # the tensor group in every round, and only the server changes it.
    travels: Literal["both", "up", "down", "given"] = "both"
    personal: bool = False  # whether the server sends different values of the tensor group to each site
    title: str = ""  # the tensor group's title in tables of the tensors that a site sends; by default, the group's name
    # If the server has no personal values for a site, the server sends the tensor group with this name instead.
    fallback_group: str | None = None
    # A function that computes a personal group at the site under secure aggregation, because the server then knows no
    # single site's tensors. The function's second argument is the site's index among the training sites, or None at an
    # evaluation site.
    apply_locally: Callable[[Modules, int | None], None] | None = None
    # why no robust aggregation can replace the mean of the tensor group, and the name of a method that does allow
    # robust aggregation
    undefended: str = ""
    # A function that returns the smallest and the largest valid value of each of the group's tensors, by the tensor's
    # name. The function's first argument contains networks on PyTorch's meta device.
    ranges: Callable[[Modules, Task], Ranges] = statistics_ranges
    # A function that raises Refused for impossible values that have the right shape, type and range.
    check: Callable[[Tensors], object] = lambda tensors: None
    # A function that may raise Refused; a site calls it after the site has received a phase's tensor groups. The
    # function's second argument is False if the server omitted this tensor group.
    arrived: Callable[[Modules, bool], None] = lambda modules, came: None
    # A function that returns facts about the sites for the summary.
    site_details: Callable[["Aggregator", Sequence[str]], Facts] = lambda aggregator, sites: {}
    # A function that returns additional lines about the tensor group for the hospitals' disclosure report.
    disclosure_notes: Callable[[Tensors], Sequence[str]] = lambda tensors: ()
    # describes the average if the tensors are an average over a site's training images, and otherwise None
    average: Average | None = None
    # True if secure aggregation clips the tensor group's values to their valid ranges; False if it clips the values to
    # the plan's smaller bound.
    unclipped: bool = False

    def given_only(self) -> Self:
        """Return a copy of this tensor group, changed so that each site receives the group once and does not send
        it.
        """
        return replace(self, travels="down")

    @property
    def goes_up(self) -> bool:
        return self.travels in ("both", "up")

    @property
    def goes_down(self) -> bool:
        return self.travels != "up"


def views(groups: Sequence[Group], modules: Modules) -> dict[str, dict[str, Tensor]]:
    """Return views of each group's tensors in a site's networks; a change of a view changes the network, too."""
    found = {group.name: group.of(modules) for group in groups}
    return {name: tensors for name, tensors in found.items() if tensors}


def places_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the memory addresses of tensors; two views of one tensor have equal addresses."""
    return {tensor.data_ptr() for tensor in tensors}


# A function that returns the only site that trains in a round; `Phase.trains_at` describes its arguments.
Turn = Callable[[int, Sequence[str], int], str]


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds in which sites exchange the same groups of tensors and train in the same way.

    >>> from medsilo.extend import Group, Phase
    >>> [group.name for group in Phase("train", 3, (Group("model", lambda own: own["model"].state_dict()),)).sent]
    ['model']
    """

    name: str
    rounds: int
    groups: tuple[Group, ...] = ()
    # A function that trains a site's networks and returns the loss, or NaN if training computes no loss.
    train_round: Callable[["TrainContext"], float] = lambda context: context.train()
    # A function that chooses the only site that trains in a round and sends tensors; None if all sites train in every
    # round. If one site is chosen, all other sites only validate the received tensors in this round.
    turn: Turn | None = None
    # A function that the server calls before the phase; if a study is resumed in the phase, the server does not call it
    # again. The function called before a phase may change initial weights that the server has not sent yet, and returns
    # facts for the summary.
    before: Callable[[ServerSide, Modules], Facts] | None = None
    trains: bool = True
    # Number of noisy means over cases that a site sends in each round under differential privacy.
    releases: int = 0
    disclosure_notes: tuple[str, ...] = ()  # lines about the phase in the hospitals' disclosure report

    def trains_at(self, site: str, number: int, sites: Sequence[str], seed: int) -> bool:
        """Return True if a site trains in a round and sends its tensors.

        Args:
            site: the site's name
            number: index of the round
            sites: the training sites, sorted
            seed: the plan's seed
        """
        return self.turn is None or self.turn(number, sites, seed) == site

    @property
    def sent(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.goes_up)

    @property
    def given(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.goes_down)

    @property
    def once(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.travels == "down")


@dataclass(frozen=True)
class Segment:
    """A phase of the schedule, with its index, its first round and its last round."""

    place: int
    first: int
    last: int
    phase: Phase


class Schedule:
    """All phases of a study in order, and the phase in which the server delivers the study's outcome.

    The index of a phase identifies the phase, because two phases may have the same name.
    """

    def __init__(self, phases: Sequence[Phase], delivery: Phase) -> None:
        self.phases = tuple(phases)
        self.delivery = delivery
        self.rounds = sum(phase.rounds for phase in phases)

    def stretches(self) -> Iterator[Segment]:
        """Yield each phase that has at least one round, with the indices of the phase's first and last round."""
        first = 1
        for place, phase in enumerate(self.phases):
            if phase.rounds:
                yield Segment(place, first, first + phase.rounds - 1, phase)
            first += phase.rounds

    def place_of(self, number: int) -> int:
        """Return the index of the phase that contains a round; a round after the study's end belongs to the last
        phase.
        """
        here = (stretch.place for stretch in self.stretches() if number <= stretch.last)
        return next(here, len(self.phases) - 1)

    def phase_of(self, number: int) -> Phase:
        return self.phases[self.place_of(number)]

    @property
    def last(self) -> Phase:
        """The last phase, which may have no rounds."""
        return self.phases[-1]

    def has_travelled(self, rounds: int) -> bool:
        """Return True if, after the given number of rounds, the server has all tensor groups that sites receive in the
        last phase.
        """
        so_far = self.phases[: self.place_of(rounds) + 1]
        return {group.name for group in self.last.given} <= {group.name for phase in so_far for group in phase.groups}

    def used_as_scored(self, rounds: int) -> bool:
        """Return True if the model after the given number of rounds can be the final model: the last phase must have
        begun or begin next.
        """
        return self.phase_of(rounds + 1).name == self.last.name
