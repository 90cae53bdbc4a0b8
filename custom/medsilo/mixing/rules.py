"""The arithmetic of means that a few dishonest sites can't bend. robust.py says where each is from.

All of them work on updates, d_i = θ_i - θ, θ being what the sites were given. The result is θ + d, or the server's
step along d. Trained weights and other numbers of a group, such as running statistics, are combined apart: their scales
differ, and the larger would hide the smaller.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from medsilo.mixing.contributions import Contributions
from medsilo.mixing.layout import Block, Layout, Tensors

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


def norm_bound(updates: Updates, factor: float) -> Tensor:
    """Return the shares of updates of which none is longer than a multiple of the median one."""
    return updates.weights * _at_most(factor * updates.norms.median(), updates.norms)


def median(columns: Tensor) -> Tensor:
    """Return the median of each column of [sites, columns]."""
    count = len(columns)
    return _in_order(columns)[(count - 1) // 2 : count // 2 + 1].mean(0)


def trimmed_mean(columns: Tensor, bad: int) -> Tensor:
    """Return the mean of each column without its smallest and its largest numbers."""
    return _in_order(columns)[bad : len(columns) - bad].mean(0)


def geometric_median(updates: Updates, iterations: int, smoothing: float) -> Tensor:
    """Return the shares by which the sites' updates make their geometric median."""
    near = _at_most(FURTHEST * updates.norms.median(), updates.norms)
    squares = _squared_distances(updates, near)
    shares = updates.weights
    for _ in range(iterations):
        # ‖Σ s_j d_j - d_i‖² = Σ_j s_j D²_ij - ½ Σ_jk s_j s_k D²_jk where Σ s_j = 1
        to_all = (squares * shares).sum(1)
        distances = (to_all - (to_all * shares).sum() / 2).clamp(min=0).sqrt()
        betas = updates.weights / distances.clamp(min=smoothing)
        before, shares = shares, betas / betas.sum()
        if (shares - before).abs().max() < SETTLED:
            break
    return shares * near


def multi_krum(updates: Updates, bad: int, keep: int | None) -> Tensor:
    """Return equal shares of the updates that are nearest to the others, and none of the rest."""
    squares = _squared_distances(updates, torch.ones_like(updates.weights))
    count = len(squares)
    nearest = squares.fill_diagonal_(torch.inf).sort(1).values[:, : count - bad - 2]
    kept = nearest.sum(1).argsort(stable=True)[: keep or count - bad]
    return torch.zeros_like(updates.weights).index_fill(0, kept, 1 / len(kept))


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
