"""Robust rules, by the names that plans give them: what takes the place of a mean, so that few sites can't bend it.

All of them work on updates, d_i = θ_i - θ, θ being what the sites were given. The result is θ + d, or the server's
step along d. Trained weights and other numbers of a group, such as running statistics, are combined apart: their scales
differ, and the larger would hide the smaller.
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

FURTHEST = 1e6  # times the median norm: what is further away counts as if it were there, so that squares keep digits
SETTLED = 1e-12  # a share that changes by less has found its place


@dataclass
class Updates:
    """The sites' updates of one part of a group, in their order."""

    rows: Contributions
    part: Layout
    origin: Tensors | None  # what the sites were given
    sites: list[str]
    weights: Tensor  # [sites], in double precision; they sum to 1

    @cached_property
    def norms(self) -> Tensor:
        """[sites]"""
        squares = torch.zeros(len(self.sites), dtype=torch.float64)
        for _, columns in self.blocks():
            squares += columns.square_().sum(1)
        return squares.sqrt()

    def blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield blocks and all sites' numbers of them: [sites, columns] in double precision; may be changed."""
        for section in self.part.sections:
            for block, numbers in self.rows.columns(self.sites, section, self.origin):
                yield block, numbers[1:]


class Reweighting(RobustRule):
    """A weighted sum of whole updates."""

    @abstractmethod
    def shares(self, updates: Updates) -> Tensor:
        """Return how much every update counts, [sites]."""


class Coordinatewise(RobustRule):
    """A rule for every number by itself."""

    @abstractmethod
    def across(self, columns: Tensor) -> Tensor:
        """Return the combined numbers, [columns], of [sites, columns]."""


class NormBound(Reweighting):
    """Sun et al., Can You Really Backdoor Federated Learning?, 2019: d = Σ p_i d_i min(1, B / ‖d_i‖).

    B is a multiple of the (lower) median norm of the round's updates, so nobody has to know a good bound beforehand.
    Against updates that are too long; not against those that point the wrong way.
    """

    weighs: ClassVar[bool] = True

    name: Literal["norm-bound"] = "norm-bound"
    factor: float = Field(1.0, gt=0, le=100, description="the longest update is so many times the median one")

    def shares(self, updates: Updates) -> Tensor:
        return updates.weights * _at_most(self.factor * updates.norms.median(), updates.norms)


class Median(Coordinatewise):
    """Yin et al., Byzantine-Robust Distributed Learning, 2018, Def. 1: the median of every number by itself.

    With an even number of sites, the mean of the two in the middle.
    """

    name: Literal["median"] = "median"

    def across(self, columns: Tensor) -> Tensor:
        count = len(columns)
        return _in_order(columns)[(count - 1) // 2 : count // 2 + 1].mean(0)


class TrimmedMean(Coordinatewise):
    """Yin et al. 2018, Def. 2: of every number by itself, the mean without the largest and the smallest ones."""

    name: Literal["trimmed-mean"] = "trimmed-mean"
    bad: int = Field(1, ge=1, le=2000, description="how many values are left out at either end (b)")

    @property
    def fewest(self) -> int:
        return 2 * self.bad + 1

    def across(self, columns: Tensor) -> Tensor:
        return _in_order(columns)[self.bad : len(columns) - self.bad].mean(0)


class GeometricMedian(Reweighting):
    """Pillutla et al., Robust Aggregation for Federated Learning (RFA), 2022: d minimises Σ p_i ‖d - d_i‖.

    By the smoothed Weiszfeld algorithm (Alg. 2): β_i = p_i / max(ν, ‖d - d_i‖), d ← Σ β_i d_i / Σ β_i. Every d on the
    way is a mean Σ s_i d_i, so all its distances follow from those between the sites' updates: contributions are read
    twice, however often shares s_i are made. It ends when they settle, or after `iterations`: then short of d.
    """

    weighs: ClassVar[bool] = True

    name: Literal["geometric-median"] = "geometric-median"
    iterations: int = Field(100, ge=1, le=10_000, description="steps of Weiszfeld's algorithm at most")
    smoothing: float = Field(1e-6, gt=0, le=1, description="shorter distances count as this one (ν)")

    def shares(self, updates: Updates) -> Tensor:
        near = _at_most(FURTHEST * updates.norms.median(), updates.norms)
        squares = _squared_distances(updates, near)
        shares = updates.weights
        for _ in range(self.iterations):
            # ‖Σ s_j d_j - d_i‖² = Σ_j s_j D²_ij - ½ Σ_jk s_j s_k D²_jk where Σ s_j = 1
            to_all = (squares * shares).sum(1)
            distances = (to_all - (to_all * shares).sum() / 2).clamp(min=0).sqrt()
            betas = updates.weights / distances.clamp(min=self.smoothing)
            before, shares = shares, betas / betas.sum()
            if (shares - before).abs().max() < SETTLED:
                break
        return shares * near


class MultiKrum(Reweighting):
    """Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, 2017.

    An update's score is the sum of its squared distances to the n - f - 2 updates nearest to it; the mean of those with
    the lowest scores is taken. All others count for nothing.
    """

    name: Literal["multi-krum"] = "multi-krum"
    bad: int = Field(1, ge=1, le=2000, description="how many sites may be dishonest (f); it needs 2 f + 3 sites")
    keep: int | None = Field(
        None, ge=1, le=4096, description="how many updates are averaged (m); 1 is Krum; `null`: all but f"
    )

    @property
    def fewest(self) -> int:
        return max(2 * self.bad + 3, self.keep or 0)

    def shares(self, updates: Updates) -> Tensor:
        squares = _squared_distances(updates, torch.ones_like(updates.weights))
        count = len(squares)
        nearest = squares.fill_diagonal_(torch.inf).sort(1).values[:, : count - self.bad - 2]
        kept = nearest.sum(1).argsort(stable=True)[: self.keep or count - self.bad]
        return torch.zeros_like(updates.weights).index_fill(0, kept, 1 / len(kept))


NAMED_RULE: TypeAdapter[RobustRule] = TypeAdapter(
    Annotated[
        NormBound | Median | TrimmedMean | GeometricMedian | MultiKrum,
        Field(discriminator="name"),
    ]
)


def capped(weights: Tensor, cap: float) -> Tensor:
    """Return the weights' shares of their sum, none above `cap`; what is cut off goes to the others, by their weights.

    Where so few sites can't make up a whole by shares of at most `cap`, all count alike.
    """
    count = len(weights)
    if cap * count <= 1:
        return torch.full_like(weights, 1 / count)
    order = weights.argsort(descending=True, stable=True)
    largest_first = weights[order]
    rests = largest_first.flip(0).cumsum(0).flip(0)  # of a weight and all smaller ones
    for full in range(count):  # how many sites are at the cap
        scale = (1 - full * cap) / rests[full]
        if scale * largest_first[full] <= cap:
            break
    shares = torch.empty_like(weights)
    shares[order] = torch.where(torch.arange(count) < full, cap, largest_first * scale)
    return shares


def _at_most(bound: Tensor, norms: Tensor) -> Tensor:
    """Return what brings vectors of these norms to the bound, where they are longer."""
    return torch.where(norms > bound, bound / norms, 1.0)


def _squared_distances(updates: Updates, scales: Tensor) -> Tensor:
    """The squared distances [sites, sites] between all sites' updates, each brought to its scale."""
    squares = torch.zeros(len(scales), len(scales), dtype=torch.float64)
    for _, columns in updates.blocks():
        columns *= scales[:, None]
        for place in range(len(columns) - 1):
            squares[place, place + 1 :] += (columns[place + 1 :] - columns[place]).square_().sum(1)
    return squares + squares.T


def _in_order(columns: Tensor) -> Tensor:
    """Every column from its smallest number to its largest (numpy's sort is several times as fast as torch's here)."""
    return torch.from_numpy(np.sort(columns.numpy(), axis=0))
