"""A group of tensors: one row of the table that a method is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from torch import Tensor

from medsilo.core.tensors import Modules, Tensors
from medsilo.course.server_side import ServerSide
from medsilo.learning.layers import running_statistics_names
from medsilo.learning.training import Training
from medsilo.mixing.mixers import Mixer, WeightedMean
from medsilo.tasks.task import Task

Facts = dict[str, Any]  # values that JSON can hold
Ranges = Mapping[str, tuple[float, float]]
FURTHEST = 1e4  # times the largest value of a task's inputs: no layer of a trained network gets larger ones


def network(name: str) -> Callable[[Modules], Tensors]:
    """Return the view of all tensors of one of a site's networks."""
    return lambda modules: modules[name].state_dict()


def sample_mean(server: ServerSide) -> Mixer:
    """Return FedAvg's mixer: the mean, weighted by training cases."""
    return WeightedMean()


def statistics_ranges(modules: Modules, task: Task) -> Ranges:
    """Return the ranges of running statistics: the layers' inputs are at most FURTHEST times the task's."""
    furthest = FURTHEST * max(1.0, task.largest_input)
    found: dict[str, tuple[float, float]] = {}
    for module in modules.values():
        means, variances = running_statistics_names(module)
        found |= dict.fromkeys(means, (-furthest, furthest)) | dict.fromkeys(variances, (0.0, furthest**2))
    return found


@dataclass(frozen=True)
class Average:
    """An average over a site's training images, which a hospital lets out of enough images only."""

    of: str  # for the leak report
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
    mix: Callable[[ServerSide], Mixer] = sample_mean
    # down: each site gets the group once in a phase and keeps it. up: sites send it and get nothing back.
    travels: Literal["both", "up", "down"] = "both"
    personal: bool = False  # every site is given values of its own
    title: str = ""  # for tables of what leaves a site; by default the name
    stand_in: str | None = None  # of a personal group: the group that a site without values of its own is given
    # Of a group that hands on single sites' own values: what a site makes of it where these are sealed, so that nothing
    # of it travels. It is told the site's place among those that train, None for others.
    at_home: Callable[[Modules, int | None], None] | None = None
    undefended: str = ""  # of a mean that no robust rule can take the place of: why, and what to use instead
    # The least and greatest value that its tensors may have, by name; asked once, with networks without values.
    ranges: Callable[[Modules, Task], Ranges] = statistics_ranges
    # Raises Refused when values that have the right form and range are impossible.
    check: Callable[[Tensors], None] = lambda tensors: None
    # Called at a site when a phase's groups have arrived, with whether this one was among them. May raise Refused.
    arrived: Callable[[Modules, bool], None] = lambda modules, came: None
    # What the server found out about the sites when all is done, for the summary's details.
    found: Callable[[Mixer, Sequence[str]], Facts] = lambda mixer, sites: {}
    # What else a hospital should know of the group, one line each, for the leak report.
    says: Callable[[Tensors], Sequence[str]] = lambda tensors: ()
    average: Average | None = None  # if tensors are one
    wide: bool = False  # where sites seal: numbers may be as large as their range, not only as the plan's bound

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
