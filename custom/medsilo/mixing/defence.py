"""A round's contributions under a robust rule: they wait until all are there, and are read block by block together."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.mixing.layout import BLOCK, Layout, Tensors
from medsilo.mixing.rules import Coordinatewise, Reweighting, RobustRule, capped
from medsilo.mixing.waiting import MEMORY, Read, WaitingRoom, reading, way

WIDEST, NARROWEST = 16 << 10, 4 << 10  # columns that are read at once of every site; the more sites, the fewer
SERIAL = 16 << 10  # numbers that torch sums in one thread, so that a sum is the same with any number of threads


@dataclass(frozen=True)
class Shield:
    """A plan's defence against dishonest sites: a rule in place of the mean, a bound on a site's share, or both."""

    rule: RobustRule | None = None
    share_cap: float | None = None
    apart: Collection[str] = ()  # names of tensors that aren't trained; they are combined apart from the others


class DefendedPart:
    """Tensors of one group that are combined together: their layout, and where the contributions wait."""

    def __init__(self, names: Collection[str], tensors: Tensors, folder: str | Path | None, memory: int) -> None:
        self.names = names
        self.layout = Layout(self.of(tensors))
        self.waiting = WaitingRoom(folder)
        self.waiting.memory = memory
        self.norms: dict[str, float] = {}

    def of(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return this part of a contribution."""
        return {name: tensors[name] for name in self.names}


class PartUpdates:
    """The updates of one part from the model that the sites were given, in sorted order of the sites."""

    def __init__(self, part: DefendedPart, weights: dict[str, float], origin: Tensors | None) -> None:
        self.part, self.sites, self.origin = part, sorted(weights), origin
        self.weights = torch.tensor([weights[site] for site in self.sites], dtype=torch.float64)
        self.norms = torch.tensor([part.norms.get(site, 0.0) for site in self.sites], dtype=torch.float64)

    def columns(self) -> Iterator[Tensor]:
        """Yield [sites, columns], each in the same memory; complex numbers as two columns each."""
        width = max(NARROWEST, min(WIDEST, BLOCK // len(self.sites)))
        reads = [_update(self.part.waiting.reader(site), self.origin) for site in self.sites]
        for section in self.part.layout.sections:
            room = torch.empty(len(self.sites), min(width, section.size), dtype=section.wide)
            for block in section.cut(width):
                columns = room[:, : block.size]
                for read, row in zip(reads, columns, strict=True):
                    read(section, block, row)
                yield torch.view_as_real(columns).flatten(1) if columns.is_complex() else columns


class Defence:
    """Keeps what comes in a round, and combines it by the shield's rule.

    Memory: what may wait in memory (`memory` bytes; the rest lies in a temporary file), a block of every site, and two
    parcels while the round closes. Numbers of integer or boolean type take the lower median of what was sent.
    """

    def __init__(self, shield: Shield, folder: str | Path | None = None) -> None:
        self.shield = shield
        self.memory = MEMORY
        self._folder = folder
        self.clear()

    def clear(self) -> None:
        """Forget every contribution."""
        self.shares: dict[str, float] = {}  # how much each contribution counts in the result
        self._parts: list[DefendedPart] = []
        self._weights: dict[str, float] = {}
        self._carried: dict[str, dict[str, Tensor]] = {}

    def put(self, site: str, tensors: Tensors, weight: float, layout: Layout, origin: Tensors | None) -> None:
        """Keep a contribution; `origin` is what the site was given."""
        if not self._parts:
            averaged = [name for section in layout.sections for name in section.names]
            kinds = [[name for name in averaged if (name in self.shield.apart) == apart] for apart in (False, True)]
            self._parts = [DefendedPart(names, tensors, self._folder, self.memory) for names in kinds if names]
        for part in self._parts:
            own = part.of(tensors)
            part.waiting.put(site, own, part.layout)
            if self.shield.rule and self.shield.rule.by_norm:
                part.norms[site] = _norm(_update(reading(own), origin), part.layout)
        self._weights[site] = weight
        self._carried[site] = {name: tensors[name] for name in layout.carried}

    def combined(self, layout: Layout, origin: Tensors | None) -> dict[str, Tensor]:
        """Return the way from `origin` to the next model by name, in single precision at least."""
        fewest = self.shield.rule.fewest if self.shield.rule else 1
        if len(self._weights) < fewest:
            rule = self.shield.rule.name if self.shield.rule else ""
            raise MedsiloError(f"{rule} needs {fewest} sites' contributions, and {len(self._weights)} came")
        ways: dict[str, Tensor] = {}
        self.shares = {}
        for part in self._parts:
            ways |= self._combine(part, origin)
            part.waiting.clear()
        return {
            name: ways[name].clone().view(shape)
            for section in layout.sections
            for name, shape in zip(section.names, section.shapes, strict=True)
        }

    def weights(self) -> dict[str, float]:
        """Return the sites' shares before any rule: alike, or by their weights where the plan bounds them."""
        rule, cap, sites = self.shield.rule, self.shield.share_cap, sorted(self._weights)
        if cap is None or (rule and not rule.weighs):
            return {site: 1 / len(sites) for site in sites}
        weights = torch.tensor([self._weights[site] for site in sites], dtype=torch.float64)
        return dict(zip(sites, capped(weights, cap).tolist(), strict=True))

    def carried(self) -> dict[str, Tensor]:
        """Return the numbers that aren't averaged: the lower median of what was sent, each by itself."""
        first, *_ = rows = [self._carried[site] for site in sorted(self._carried)]
        return {name: _middle(torch.stack([row[name] for row in rows])) for name in first}

    def _combine(self, part: DefendedPart, origin: Tensors | None) -> dict[str, Tensor]:
        rule, layout = self.shield.rule, part.layout
        updates = PartUpdates(part, self.weights(), origin)
        if isinstance(rule, Coordinatewise):
            across = rule.across
        else:
            shares = rule.shares(updates) if isinstance(rule, Reweighting) else updates.weights
            self.shares = self.shares or dict(zip(updates.sites, shares.tolist(), strict=True))
            across = partial(_weighted, shares)
        rooms = [section.room() for section in layout.sections]
        ends = [torch.view_as_real(room).flatten() if room.is_complex() else room for room in rooms]
        begin = place = 0
        for columns in updates.columns():
            while begin == len(ends[place]):
                begin, place = 0, place + 1
            end = begin + columns.shape[1]
            ends[place][begin:end] = across(columns)
            begin = end
        return {
            name: vector
            for section, room in zip(layout.sections, rooms, strict=True)
            for name, vector in zip(section.names, room.split(section.sizes), strict=True)
        }


def _weighted(shares: Tensor, columns: Tensor) -> Tensor:
    return (columns * shares[:, None]).sum(0)


def _update(read: Read, origin: Tensors | None) -> Read:
    return read if origin is None else way(read, origin)


def _norm(read: Read, layout: Layout) -> float:
    """The norm of a contribution's way, in double precision."""
    squares = 0.0
    for section in layout.sections:
        room = section.scratch(BLOCK)[0]
        for block in section.blocks:
            numbers = room[: block.size]
            read(section, block, numbers)
            squares += sum(float(norm) ** 2 for norm in torch._foreach_norm(numbers.split(SERIAL)))
    return squares**0.5


def _middle(values: Tensor) -> Tensor:
    """The lower median over the first dimension."""
    return (values.long() if values.dtype == torch.bool else values).median(0).values.to(values.dtype)
