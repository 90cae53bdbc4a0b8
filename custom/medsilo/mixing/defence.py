"""A plan's defence: contributions wait until all are there, and are read block by block together."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.section import Feature
from medsilo.core.tensors import Modules
from medsilo.mixing.contributions import Contributions
from medsilo.mixing.layout import Layout, Tensors
from medsilo.mixing.rules import Coordinatewise, Reweighting, Robust, RobustRule, Updates, capped


@dataclass(frozen=True)
class Shield:
    """A plan's defence against dishonest sites: a rule in place of the mean, a bound on a site's share, or both."""

    rule: RobustRule | None = None
    max_weight: float | None = None
    apart: Collection[str] = ()  # names of tensors that aren't trained; they are combined apart from the others

    def combined(
        self, rows: Contributions, weights: Mapping[str, float], layout: Layout, origin: Tensors | None
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the way from `origin`, which the sites were given, to the next model by name, in single precision at
        least; and how much each contribution counts in it, where that is one number."""
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

    def _parts(self, layout: Layout, row: Tensors) -> list[Layout]:
        """Return the make-up of the trained weights, and of the other tensors."""
        kinds = [[name for name in layout.averaged if (name in self.apart) == apart] for apart in (False, True)]
        return [Layout({name: row[name] for name in names}) for names in kinds if names]

    def _shares(self, weights: Mapping[str, float]) -> Tensor:
        """Return the sites' shares before any rule: alike, or by their weights where the plan bounds them."""
        if self.max_weight is None or (self.rule and not self.rule.weighs):
            return torch.full((len(weights),), 1 / len(weights), dtype=torch.float64)
        return capped(torch.tensor([weights[site] for site in sorted(weights)], dtype=torch.float64), self.max_weight)


def _weighted(shares: Tensor, columns: Tensor) -> Tensor:
    return (columns * shares[:, None]).sum(0)


def lower_median(values: Tensor) -> Tensor:
    """The lower median over the first dimension, which takes the mean's place for integers and booleans."""
    return (values.long() if values.dtype == torch.bool else values).median(0).values.to(values.dtype)


class AggregationSettings(Feature):
    """The server's defence against hospitals that send wrong or harmful tensors."""

    robust: Robust | None = Field(
        None,
        description="what takes the place of every mean over hospitals, so that a few dishonest ones can't bend the "
        "model. Hospitals count alike in it, unless `max_weight` is given with "
        "`norm-bound` or `geometric-median`. Groups of which every hospital has values of its own stay as the method "
        "mixes them",
    )
    max_weight: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the most that one hospital may count for in a mean, whatever number of cases it claims; what is "
        "cut off goes to the others",
    )

    def shield(self, apart: Collection[str]) -> Shield | None:
        """Return what mixers are defended by; None where the plan asks for nothing."""
        return Shield(self.robust, self.max_weight, apart) if self.robust or self.max_weight else None

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        if not (self.robust or self.max_weight):
            return
        method, hospitals = plan.algorithm.name, plan.participation.required
        means = [group for phase in plan.course.phases for group in phase.sent if not group.personal]
        if not means:
            yield (
                f"mixing: {method} takes no mean over hospitals that a robust rule could take the place of; use "
                "fedavg, fedbn or ditto, or leave aggregation.robust and aggregation.max_weight out"
            )
        for group in means:
            if group.undefended:
                yield (group.undefended)
        if self.robust and hospitals < self.robust.fewest:
            yield (
                f"aggregation.robust: {self.robust.name} needs {self.robust.fewest} hospitals in every round, and "
                f"{hospitals} are enough for this plan; raise participation.minimum, or lower what the rule asks for"
            )
        if self.max_weight and self.robust and not self.robust.weighs:
            yield (f"aggregation.max_weight: all hospitals count alike in {self.robust.name}; set it to null")
        if self.max_weight and self.max_weight * hospitals < 1:
            yield (
                f"aggregation.max_weight: shares of at most {self.max_weight:g} can't sum to 1 with {hospitals} sites; "
                f"give {1 / hospitals:.3g} or more"
            )

    def warnings(self, plan: Any) -> Iterable[str]:
        if not (self.robust or self.max_weight):
            return []
        groups = [group for phase in plan.course.phases for group in phase.groups]
        mixed = sorted({group.title or group.name for group in groups if group.personal and group.travels == "both"})
        return [
            f"mixing: the {title} of every hospital is mixed as the method says, so what a dishonest hospital sends of "
            "it reaches the others"
            for title in mixed
        ]
