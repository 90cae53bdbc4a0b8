"""A round's contributions under a robust rule: they wait until all are there, and are read block by block together."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.core.section import Feature
from medsilo.core.tensors import Modules
from medsilo.mixing.contributions import Contributions
from medsilo.mixing.layout import BLOCK, Block, Layout, Tensors
from medsilo.mixing.rules import Coordinatewise, Reweighting, Robust, RobustRule, capped

WIDEST, NARROWEST = 16 << 10, 4 << 10  # columns that are read at once of every site; the more sites, the fewer
SERIAL = 16 << 10  # numbers that torch sums in one thread, so that a sum is the same with any number of threads


@dataclass(frozen=True)
class Shield:
    """A plan's defence against dishonest sites: a rule in place of the mean, a bound on a site's share, or both."""

    rule: RobustRule | None = None
    share_cap: float | None = None
    apart: Collection[str] = ()  # names of tensors that aren't trained; they are combined apart from the others


@dataclass
class PartUpdates:
    """The updates of some tensors from the model that the sites were given, in sorted order of the sites."""

    rows: Contributions
    part: Layout
    origin: Tensors | None
    sites: list[str]
    weights: Tensor  # [sites], in double precision; they sum to 1
    norms: Tensor  # [sites]

    def columns(self) -> Iterator[Tensor]:
        """Yield [sites, columns], always in the same memory; complex numbers as two columns each."""
        return (columns for _, columns in self.blocks())

    def blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the same beside the blocks of which they are."""
        width = max(NARROWEST, min(WIDEST, BLOCK // len(self.sites)))
        for section in self.part.sections:
            for block, numbers in self.rows.columns(self.sites, section, width, self.origin):
                ways = numbers[1:]
                yield block, torch.view_as_real(ways).flatten(1) if ways.is_complex() else ways


class Defence:
    """Combines what has come in a round by the shield's rule.

    Numbers of integer or boolean type take the lower median of what was sent.
    """

    def __init__(self, shield: Shield) -> None:
        self.shield = shield
        self.clear()

    def clear(self) -> None:
        """Forget every contribution."""
        self.shares: dict[str, float] = {}  # how much each contribution counts in the result
        self._parts: list[tuple[Layout, dict[str, float]]] = []  # and the norm of each site's update
        self._carried: dict[str, Tensors] = {}

    def put(self, site: str, tensors: Tensors, carried: Tensors, layout: Layout, origin: Tensors | None) -> None:
        """Note what has to be known of a contribution; `origin` is what the site was given."""
        if not self._parts:
            kinds = [
                [name for name in layout.averaged if (name in self.shield.apart) == apart] for apart in (False, True)
            ]
            self._parts = [(Layout({name: tensors[name] for name in names}), {}) for names in kinds if names]
        self._carried[site] = carried
        if self.shield.rule and self.shield.rule.by_norm:
            for part, norms in self._parts:
                norms[site] = _norm(tensors, part, origin)

    def combined(
        self, rows: Contributions, weights: Mapping[str, float], layout: Layout, origin: Tensors | None
    ) -> dict[str, Tensor]:
        """Return the way from `origin` to the next model by name, in single precision at least."""
        rule = self.shield.rule
        if rule and len(weights) < rule.fewest:
            raise MedsiloError(f"{rule.name} needs {rule.fewest} sites' contributions, and {len(weights)} came")
        ways, shares, sites = layout.rooms(), self._shares(weights), sorted(weights)
        self.shares = {}
        for part, norms in self._parts:
            lengths = torch.tensor([norms.get(site, 0.0) for site in sites], dtype=torch.float64)
            updates = PartUpdates(rows, part, origin, sites, shares, lengths)
            if isinstance(rule, Coordinatewise):
                across = rule.across
            else:
                own = rule.shares(updates) if isinstance(rule, Reweighting) else shares
                self.shares = self.shares or dict(zip(sites, own.tolist(), strict=True))
                across = partial(_weighted, own)
            for block, columns in updates.blocks():
                numbers = across(columns)
                is_complex = ways[block.pieces[0].name].is_complex()
                block.write(torch.view_as_complex(numbers.view(-1, 2)) if is_complex else numbers, ways)
        return ways

    def _shares(self, weights: Mapping[str, float]) -> Tensor:
        """Return the sites' shares before any rule: alike, or by their weights where the plan bounds them."""
        rule, cap = self.shield.rule, self.shield.share_cap
        if cap is None or (rule and not rule.weighs):
            return torch.full((len(weights),), 1 / len(weights), dtype=torch.float64)
        return capped(torch.tensor([weights[site] for site in sorted(weights)], dtype=torch.float64), cap)

    def carried(self) -> dict[str, Tensor]:
        """Return the numbers that aren't averaged: the lower median of what was sent, each by itself."""
        first, *_ = rows = [self._carried[site] for site in sorted(self._carried)]
        return {name: _middle(torch.stack([row[name] for row in rows])) for name in first}


def _weighted(shares: Tensor, columns: Tensor) -> Tensor:
    return (columns * shares[:, None]).sum(0)


def _norm(tensors: Tensors, layout: Layout, origin: Tensors | None) -> float:
    """The norm of a contribution's way from `origin`, in double precision."""
    squares = 0.0
    for section in layout.sections:
        room = torch.empty(section.widest, dtype=section.wide)
        for block in section.blocks:
            numbers = room[: block.size]
            block.read(tensors, numbers)
            if origin is not None:
                block.subtract(origin, numbers)
            squares += sum(float(norm) ** 2 for norm in torch._foreach_norm(numbers.split(SERIAL)))
    return squares**0.5


def _middle(values: Tensor) -> Tensor:
    """The lower median over the first dimension."""
    return (values.long() if values.dtype == torch.bool else values).median(0).values.to(values.dtype)


class Mixing(Feature):
    """The server's defence against hospitals that send wrong or harmful tensors."""

    robust: Robust | None = Field(
        None,
        description="what takes the place of every mean over hospitals, so that a few dishonest ones can't bend the "
        "model ([privacy.md](privacy.md#robust-rules)). Hospitals count alike in it, unless `share_cap` is given with "
        "`norm-bound` or `geometric-median`. Groups of which every hospital has values of its own stay as the method "
        "mixes them",
    )
    share_cap: float | None = Field(
        None,
        gt=0,
        le=1,
        description="the most that one hospital may count for in a mean, whatever number of cases it claims; what is "
        "cut off goes to the others",
    )

    def shield(self, apart: Collection[str]) -> Shield | None:
        """Return what mixers are defended by; None where the plan asks for nothing."""
        return Shield(self.robust, self.share_cap, apart) if self.robust or self.share_cap else None

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        if not (self.robust or self.share_cap):
            return
        method, hospitals = plan.algorithm.name, plan.participation.required
        means = [group for phase in plan.course.phases for group in phase.sent if not group.personal]
        if not means:
            yield (
                f"mixing: {method} takes no mean over hospitals that a robust rule could take the place of; use "
                "fedavg, fedbn or ditto, or leave mixing.robust and mixing.share_cap out"
            )
        for group in means:
            if group.undefended:
                yield (group.undefended)
        if self.robust and hospitals < self.robust.fewest:
            yield (
                f"mixing.robust: {self.robust.name} needs {self.robust.fewest} hospitals in every round, and "
                f"{hospitals} are enough for this plan; raise participation.minimum, or lower what the rule asks for"
            )
        if self.share_cap and self.robust and not self.robust.weighs:
            yield (f"mixing.share_cap: all hospitals count alike in {self.robust.name}; set it to null")
        if self.share_cap and self.share_cap * hospitals < 1:
            yield (
                f"mixing.share_cap: shares of at most {self.share_cap:g} make no whole with {hospitals} hospitals; "
                f"give {1 / hospitals:.3g} or more"
            )

    def cautions(self, plan: Any) -> Iterable[str]:
        if not (self.robust or self.share_cap):
            return []
        groups = [group for phase in plan.course.phases for group in phase.groups]
        mixed = sorted({group.title or group.name for group in groups if group.personal and group.travels == "both"})
        return [
            f"mixing: the {title} of every hospital is mixed as the method says, so what a dishonest hospital sends of "
            "it reaches the others"
            for title in mixed
        ]
