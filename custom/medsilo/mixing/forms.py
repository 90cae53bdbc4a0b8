"""Forms of a mixer's mathematics, as data, for numbers that the server cannot read.

A mixer declares one of these forms; neither the server's side nor a site's knows methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


@dataclass(frozen=True)
class MeanForm:
    """The mean of what sites send is all that is needed.

    weighted: by the sites' cases; else all count alike.
    enter: what a site sends in place of its tensors, from them and from those that had arrived; their mean is what the
        mixer's `take_mean` expects.
    """

    weighted: bool
    enter: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class PullForm:
    """Each site moves its own tensors towards the mean of all others; it needs their sum, and the server nothing.

    pull: how much of its own a site keeps.
    """

    pull: float


@dataclass(frozen=True)
class ServerReadable:
    """The server has to read what sites send."""

    why: str


class Mean(Enum):
    """A plain mean over sites: a method names it, and the server alone makes its mixer (`mixers.mixer_of`)."""

    OF_CASES = "weighted by training cases, as FedAvg's"
    OF_SITES = "in which all sites count alike"


Form = MeanForm | PullForm | ServerReadable
