"""Combine the sites' tensors by a plan's robust rule, block by block, once all sites have answered."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from medsilo.mixing.contributions import Contributions
from medsilo.mixing.layout import Layout, Tensors
from medsilo.mixing.robust import RobustRule
from medsilo.mixing.rules import Coordinatewise, Reweighting, Updates, capped


@dataclass(frozen=True)
class Shield:
    """A plan's defence against dishonest sites: a robust rule that replaces the mean, a bound on each site's weight, or
    both.
    """

    rule: RobustRule | None = None
    max_weight: float | None = None
    # names of tensors without gradients; these tensors and the trained weights are combined separately
    apart: Collection[str] = ()

    def combined(
        self, rows: Contributions, weights: Mapping[str, float], layout: Layout, origin: Tensors | None
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the difference between the next model and the model that the server sent to the sites. If the rule
        gives each site one weight for all elements, also return these weights.
        """
        ways, alike, sites, counts = layout.rooms(), self._shares(weights), sorted(weights), dict[str, float]()
        for part in self._parts(layout, next(rows.each(sites))):
            updates = Updates(rows, part, origin, sites, alike)
            if isinstance(self.rule, Coordinatewise):
                across = self.rule.across
            else:
                shares = self.rule.shares(updates) if isinstance(self.rule, Reweighting) else alike
                counts = counts or dict(zip(sites, shares.tolist(), strict=True))
                across = partial(_weighted, shares)
            for block, columns in updates.blocks():
                block.write(across(columns), ways)
        return ways, counts

    def carried(self, rows: Iterable[Tensors], layout: Layout) -> dict[str, Tensor]:
        held = list(rows)
        return {name: _lower_median(torch.stack([row[name] for row in held])) for name in layout.carried}

    def _parts(self, layout: Layout, row: Tensors) -> list[Layout]:
        kinds = [[name for name in layout.averaged if (name in self.apart) == apart] for apart in (False, True)]
        return [Layout({name: row[name] for name in names}) for names in kinds if names]

    def _shares(self, weights: Mapping[str, float]) -> Tensor:
        """Return the sites' weights for the robust rule: equal weights, or capped weights if the plan bounds
        weights.
        """
        if self.max_weight is None or (self.rule and not self.rule.weighs):
            return torch.full((len(weights),), 1 / len(weights), dtype=torch.float64)
        return capped(torch.tensor([weights[site] for site in sorted(weights)], dtype=torch.float64), self.max_weight)


def _weighted(shares: Tensor, columns: Tensor) -> Tensor:
    return (columns * shares[:, None]).sum(0)


def _lower_median(values: Tensor) -> Tensor:
    """Return the lower median over the first dimension, which replaces a mean for integers and booleans."""
    return (values.long() if values.dtype == torch.bool else values).median(0).values.to(values.dtype)
