"""Robust aggregation rules, which replace a mean so that a few dishonest sites can't distort the model.

The rules combine updates d_i = θ_i - θ, where θ are the weights sent to the sites. The server adds the combined update
d to the weights θ, or takes a step in the direction of d. Trained weights and running statistics are combined
separately, because they have different scales, and large values would hide small values.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from medsilo.mixing.contributions import Contributions
from medsilo.mixing.layout import Block, Layout, Tensors
from medsilo.mixing.robust import RobustRule


@dataclass
class Updates:
    """The sites' updates: either only trained weights, or only the other tensors."""

    rows: Contributions
    part: Layout
    origin: Tensors | None  # the tensors that the server sent to the sites before they trained
    sites: list[str]
    weights: Tensor  # the sites' weights [sites], in double precision; their sum is 1

    @cached_property
    def norms(self) -> Tensor:
        squares = torch.zeros(len(self.sites), dtype=torch.float64)
        for _, columns in self.blocks():
            squares += columns.square_().sum(1)
        return squares.sqrt()

    def blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield, for each block, the values of all sites, [sites, columns] in double precision; callers may change
        these values.
        """
        for section in self.part.sections:
            for block, numbers in self.rows.columns(self.sites, section, self.origin):
                yield block, numbers[1:]


class Reweighting(RobustRule):
    """A rule that gives each update one weight, and returns the weighted sum of the updates."""

    @abstractmethod
    def shares(self, updates: Updates) -> Tensor:
        """Return the weight that the rule gives each update, [sites]."""


class Coordinatewise(RobustRule):
    @abstractmethod
    def across(self, columns: Tensor) -> Tensor:
        """Combine the sites' values [sites, columns] into one value per column, [columns]."""


class NormBound(Reweighting):
    """Sun et al., Can You Really Backdoor Federated Learning?, 2019: d = Σ p_i d_i min(1, B / ‖d_i‖).

    The bound B is a multiple of the (lower) median norm of the round's updates, so nobody has to choose a bound. The
    bound B limits updates that are too long, but not updates that point in a wrong direction.
    """

    weighs: ClassVar[bool] = True

    name: Literal["norm-bound"] = "norm-bound"
    factor: float = Field(
        1.0,
        gt=0,
        le=100,
        description="the largest ratio of an update's norm to the median "
        "norm of the round's updates; a longer update gets less weight",
    )

    def shares(self, updates: Updates) -> Tensor:
        return updates.weights * _at_most(self.factor * updates.norms.median(), updates.norms)


class Median(Coordinatewise):
    """Yin et al., Byzantine-Robust Distributed Learning, 2018, Definition 1: the median of each coordinate of the
    updates.

    With an even number of sites, the median is the mean of the two middle values.
    """

    name: Literal["median"] = "median"

    def across(self, columns: Tensor) -> Tensor:
        count = len(columns)
        return _in_order(columns)[(count - 1) // 2 : count // 2 + 1].mean(0)


class TrimmedMean(Coordinatewise):
    """Yin et al. 2018, Definition 2: the mean of each coordinate of the updates, after leaving out the coordinate's
    largest and smallest values.
    """

    name: Literal["trimmed-mean"] = "trimmed-mean"
    bad: int = Field(
        1,
        ge=1,
        le=2000,
        description="b: for each weight of the network, the rule leaves out the b largest and the b smallest values of "
        "the hospitals",
    )

    @property
    def fewest(self) -> int:
        return 2 * self.bad + 1

    def across(self, columns: Tensor) -> Tensor:
        return _in_order(columns)[self.bad : len(columns) - self.bad].mean(0)


class MultiKrum(Reweighting):
    """Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, 2017.

    An update's score is the sum of its squared distances to the n - f - 2 nearest of n updates, of which f may be
    dishonest. The rule averages the updates with the lowest scores, and ignores the updates with higher scores.
    """

    name: Literal["multi-krum"] = "multi-krum"
    bad: int = Field(
        1, ge=1, le=2000, description="largest number of dishonest sites (f); the rule needs 2 f + 3 sites"
    )
    keep: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="m: how many updates the rule averages; with 1, the rule is Krum; `null`: all updates except f",
    )

    @property
    def fewest(self) -> int:
        return max(2 * self.bad + 3, self.keep or 0)

    def shares(self, updates: Updates) -> Tensor:
        squares = _squared_distances(updates)
        count = len(squares)
        nearest = squares.fill_diagonal_(torch.inf).sort(1).values[:, : count - self.bad - 2]
        kept = nearest.sum(1).argsort(stable=True)[: self.keep or count - self.bad]
        return torch.zeros_like(updates.weights).index_fill(0, kept, 1 / len(kept))


NAMED_RULE: TypeAdapter[RobustRule] = TypeAdapter(
    Annotated[
        NormBound | Median | TrimmedMean | MultiKrum,
        Field(discriminator="name"),
    ]
)


def capped(weights: Tensor, cap: float) -> Tensor:
    """Normalise the weights and cap each weight; the excess over the cap goes to the sites below the cap in proportion
    to their weights.

    All sites get equal weights if capped weights can't add up to 1.
    """
    count = len(weights)
    if cap * count <= 1:
        return torch.full_like(weights, 1 / count)
    order = weights.argsort(descending=True, stable=True)
    largest_first = weights[order]
    # for each weight, the sum of this weight and of all smaller weights
    rests = largest_first.flip(0).cumsum(0).flip(0)
    for full in range(count):  # number of sites whose weight is capped
        scale = (1 - full * cap) / rests[full]
        if scale * largest_first[full] <= cap:
            break
    shares = torch.empty_like(weights)
    shares[order] = torch.where(torch.arange(count) < full, cap, largest_first * scale)
    return shares


def _at_most(bound: Tensor, norms: Tensor) -> Tensor:
    return torch.where(norms > bound, bound / norms, 1.0)


def _squared_distances(updates: Updates) -> Tensor:
    squares = torch.zeros(len(updates.sites), len(updates.sites), dtype=torch.float64)
    for _, columns in updates.blocks():
        for place in range(len(columns) - 1):
            squares[place, place + 1 :] += (columns[place + 1 :] - columns[place]).square_().sum(1)
    return squares + squares.T


def _in_order(columns: Tensor) -> Tensor:
    """Sort the values of every column with NumPy, which sorts columns several times as fast as torch does."""
    return torch.from_numpy(np.sort(columns.numpy(), axis=0))
