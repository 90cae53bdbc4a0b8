"""Describe each aggregation as data; secure aggregation needs the description, because the server cannot read single
answers.

Each aggregator declares its kind of aggregation, so that secure aggregation needs no code for single methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


@dataclass(frozen=True)
class MeanForm:
    """An aggregation for which the server needs only the mean of the sites' tensors.

    Args:
        enter: a function that converts a site's tensors, and the tensors that the site received, into the tensors to
            send; `take_mean` takes the mean of the sent tensors
    """

    weighted: bool
    enter: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class PullForm:
    """An aggregation in which each site moves its tensors towards the mean of all others, and needs only the sum of the
    others' tensors.

    Args:
        pull: the weight of the site's own tensors
    """

    pull: float


@dataclass(frozen=True)
class ServerReadable:
    """An aggregation for which the server must read each site's tensors."""

    why: str


class Mean(Enum):
    """The kinds of mean over sites; a method names a kind, and the server creates the aggregator that computes this
    mean.
    """

    OF_CASES = "weighted by training cases, as FedAvg's"
    OF_SITES = "in which all sites count alike"


Form = MeanForm | PullForm | ServerReadable
