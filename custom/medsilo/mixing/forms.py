"""Forms of a mixer's mathematics, as data, for numbers that the server cannot read.

A mixer declares one of these forms; neither the server's side nor a site's knows methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


@dataclass(frozen=True)
class MeanForm:
    """The server needs only the mean of the sites' tensors.

    Args:
        weighted: by the sites' cases; else all count alike
        enter: turns a site's tensors, and the tensors that it received, into the tensors to send; `take_mean` takes
            their mean
    """

    weighted: bool
    enter: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class PullForm:
    """Each site moves its own tensors towards the mean of all others; it needs their sum, and the server none of them.

    pull: the weight of the site's own tensors.
    """

    pull: float


@dataclass(frozen=True)
class ServerReadable:
    """An aggregation for which the server must read each site's tensors."""

    why: str


class Mean(Enum):
    """A plain mean over sites: a method names it, and the server alone makes its mixer (`mixers.mixer_of`)."""

    OF_CASES = "weighted by training cases, as FedAvg's"
    OF_SITES = "in which all sites count alike"


Form = MeanForm | PullForm | ServerReadable
