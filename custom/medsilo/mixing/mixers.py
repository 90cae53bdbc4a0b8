"""Mixers: θ_i ← Σ_j M_ij θ_j, the server's memory and mathematics for one group of tensors.

A mixer lives as long as the study. Round after round:

    mixer.start(sites)                    # who takes part in the study
    mixer.current(site)                   # what the site trains from
    mixer.add(site, tensors, weight)      # what the site sends back, in any order
    mixer.finish()                        # `current` is then what each site gets next

The result is the same to the last bit whatever the order of arrival, because sums run over the sites in sorted order.
What is kept from one site to the next is in single precision at least. Numbers of integer or boolean type are never
averaged: a mean takes them from the first site in sorted order that answered, a personal model keeps its own.

Whoever adds tensors hands them over, and whoever is given tensors only reads them: the same tensors may be on their way
to several sites. A mixer itself changes neither. Calls must come one at a time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.lazy import lazily
from medsilo.mixing.contributions import Contributions, fold
from medsilo.mixing.forms import Form, Mean, MeanForm
from medsilo.mixing.layout import Block, Layout, Tensors, numbers_of, spread

if TYPE_CHECKING:  # only some studies need these; scripts find them here
    from medsilo.mixing.defence import Shield
    from medsilo.mixing.personal import Identity, SimilarityMix, SoftPull  # noqa: F401

__getattr__ = lazily(__name__, __file__)
RUNNING = ("running_mean", "running_var")  # torch's names of running statistics


class Aggregator(ABC):
    """One group of tensors across rounds: who may contribute, who has, and what everybody was given last."""

    def __init__(self) -> None:
        self._sites: list[str] = []
        self._answered: set[str] = set()
        self._layout: Layout | None = None
        # The weight of each contribution in the round that has closed; empty where it is not one number.
        self.shares: Mapping[str, float] = {}

    # -- a round ------------------------------------------------------------------------------------------------------

    def start(self, sites: Iterable[str], initial: Tensors | None = None) -> None:
        """Begins a round (and closes the one before).

        sites: the names of the study's sites; what a site was given in earlier rounds stays.
        initial: tensors that every site gets that was never given any; shared, not copied.
        """
        self.finish()
        self._sites = sorted(sites)
        self._answered = set()
        self._layout = None
        self.shares = {}
        if initial is not None:
            self._begin_with(dict(initial))

    @torch.no_grad()
    def add(self, site: str, tensors: Tensors, weight: float) -> None:
        """Takes what one site sends: tensors by name, and how many samples they rest on. Their form was checked.

        What can't be mixed raises Refused and changes nothing: the site may send again.
        """
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        layout = self._layout or Layout(own)
        self._take(site, own, float(weight), layout)
        self._layout = layout
        self._answered.add(site)
        self._settle()

    @torch.no_grad()
    def finish(self) -> None:
        """Closes the round: mixes what has come. After it, `current` is the result."""
        if self._answered:
            self._merge()
        self._answered = set()

    def current(self, site: str) -> dict[str, Tensor]:
        """Return what the site was given last, untouched by what comes in before the round closes."""
        row = self._row(site)
        if row is None:
            raise MedsiloError(f"{site}: no tensors for this site yet: it neither sent any nor was given any")
        return dict(row)

    # -- between rounds -----------------------------------------------------------------------------------------------

    def state(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return what must outlive the process, between two rounds: tensors by key, and facts that JSON can hold."""
        tensors, facts = self._save()
        return tensors, {"sites": list(self._sites), **facts}

    def load_state(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Continues from what `state` gave, before anything has come; the tensors are shared, not copied."""
        self.finish()
        self._load(tensors, facts)
        self._sites = list(facts["sites"])

    @property
    def matrix(self) -> Tensor | None:
        """Return W by which each site's model is mixed of all, where there is one."""
        return None

    def defend(self, shield: "Shield") -> None:
        """Combine contributions by the shield's rule from now on."""
        raise PlanError(f"mixing: {type(self).__name__} is not a mean that a robust rule could take the place of")

    # -- what makes a mixer -------------------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        """Takes a contribution that is in order; changes nothing if it fails."""

    @abstractmethod
    def _row(self, site: str) -> dict[str, Tensor] | None:
        """Return what the site was given last."""

    # What one that holds no tensors of its own leaves as it is

    def _begin_with(self, initial: dict[str, Tensor]) -> None:  # noqa: B027
        """Takes the initial tensors for every site that has none."""

    def _merge(self) -> None:  # noqa: B027
        """Mixes what has come and makes it what the sites were given last."""

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return {}, {}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:  # noqa: B027
        """Holds what `_save` gave."""

    def _settle(self) -> None:  # noqa: B027
        """Does what has become possible by the last contribution."""


# -- one model for all ------------------------------------------------------------------------------------------------


class WeightedMean(Aggregator):
    """FedAvg: θ ← Σ_k n_k θ_k / Σ_k n_k over the sites that answered; every site gets it, also the others.

    Holds the last mean and, while a round is open, the mean so far: two parcels (four of a half-precision group's), for
    any number of sites. A contribution waits until the sites before it, in sorted order, have had their turn. Until the
    round closes, `current` is the last mean, also for a site that has answered.

    rate: η_g, the server's step: θ ← θ + η_g (mean - θ). 1 is the mean itself, to the last bit. Running statistics
        always take the mean.
    """

    uniform: bool = False  # whether all sites that answered count alike
    _waits: bool = False  # whether nothing is added up before the round closes

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.rate = rate
        self._given: dict[str, Tensor] | None = None
        self._rows = Contributions()
        self._shield: Shield | None = None
        self._begin_sum()

    def defend(self, shield: "Shield") -> None:
        """Combine contributions by the shield's rule; the server's step is made along the result.

        All of them wait until the round closes.
        """
        self._shield, self._waits = shield, True

    @property
    def sealed(self) -> Form:
        """Return how it is mixed where the server cannot read what sites send."""
        return MeanForm(weighted=not self.uniform)

    def take_mean(self, tensors: Tensors, weights: Mapping[str, float]) -> None:
        """Take the mean of these sites' tensors as if each of them had sent it."""
        first, *others = sorted(weights)
        self.add(first, tensors, math.fsum(weights.values()))
        self._answered |= set(others)
        self._numbers = dict(weights)

    def _begin_sum(self) -> None:
        self._rows.clear()
        self._numbers = dict[str, float]()  # the weights of those that have answered, where they are single numbers
        self._turn = 0  # place of the site whose contribution comes next
        self._total = 0.0
        self._mean: dict[str, Tensor] = {}  # so far, by name, in single precision at least
        self._carried: dict[str, Tensor] = {}

    def _begin_with(self, initial: dict[str, Tensor]) -> None:
        if self._given is None:
            self._given = initial

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        self._rows.put(site, tensors, tensors if self._shield else layout.averaged, self._is_next(site))
        self._numbers[site] = 1.0 if self.uniform else weight
        if not self._answered or site < min(self._answered):
            self._carried = {name: tensors[name] for name in layout.carried}

    def _is_next(self, site: str) -> bool:
        """Return whether what this site sends is added up at once."""
        return not self._waits and site == self._sites[self._turn]

    def _settle(self) -> None:
        """Add up what has come of those whose turn it is.

        So a round of six models of 28 M parameters closes 9 ms after the last has come, and not 80 ms.
        """
        if not self._waits:
            ready = list(takewhile(self._rows.__contains__, self._sites[self._turn :]))
            self._turn += len(ready)
            self._fold(ready)

    @property
    def _is_mean(self) -> bool:
        """Return whether the result is the mean itself and not a step towards it."""
        return self.rate == 1.0 and self._shield is None

    @property
    def _origin(self) -> dict[str, Tensor] | None:
        """The last model, where the server makes a step from it: then the ways to the sites' models are averaged, which
        are short and keep their digits."""
        return None if self._is_mean else self._given

    def _fold(self, sites: list[str]) -> None:
        """Add sites' rows to the mean so far, of the models or of the ways to them; they are dropped.

        Equal sites leave it as it is, to the last bit.
        """
        if not sites:
            return
        assert self._layout is not None
        self._mean = self._mean or self._layout.rooms()
        totals = list(accumulate((self._numbers[site] for site in sites), initial=self._total))[1:]
        shares = {site: self._numbers[site] / total for site, total in zip(sites, totals, strict=True)}
        fold(self._mean, self._layout, self._rows, shares, self._origin)
        self._total = totals[-1]
        self._rows.drop(sites)

    def _merge(self) -> None:
        assert self._layout is not None
        if self._shield:
            self._combine(self._shield, self._layout)
        self._fold([site for site in self._sites[self._turn :] if site in self._rows])
        total = math.fsum(self._numbers.values())
        self.shares = {site: weight / total for site, weight in sorted(self._numbers.items())}
        origin = self._origin
        if origin is not None:
            self._move(((theta, mean) for _, theta, mean in self._beside(origin, self._layout)), self._layout)
        self._given = origin = None  # makes room
        self._given = self._layout.narrowed(self._mean, self._carried)
        self._begin_sum()

    def _combine(self, shield: "Shield", layout: Layout) -> None:
        """Make the mean, or the way to it, of what waits."""
        self._mean, shares = shield.combined(self._rows, self._numbers, layout, self._given)
        self._carried = shield.carried(self._rows.each(self._numbers), layout)
        self._numbers = shares
        self._rows.clear()

    def _move(self, blocks: Iterator[tuple[Tensor, Tensor]], layout: Layout) -> None:
        """The server's step from the last model, d being the mean way from it: d ← θ + η_g d."""
        if self.rate == 1.0 or not any(name.endswith(RUNNING) for name in layout.averaged):
            for theta, d in blocks:
                torch.add(theta, d, alpha=self.rate, out=d)
            return
        # Running statistics take their mean: a variance that is stepped beyond it may be negative.
        rates = {name: 1.0 if name.endswith(RUNNING) else self.rate for name in layout.averaged}
        step(blocks, spread(rates, layout), layout)

    def _beside(self, model: Tensors, layout: Layout) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """A model and, to be changed in place, the mean, block by block in double precision."""
        for section in layout.sections:
            rooms = torch.empty(2, section.widest, dtype=torch.float64)
            for block in section.blocks:
                theta, mean = rooms[:, : block.size]
                block.read(model, theta)
                block.read(self._mean, mean)
                yield block, theta, mean
                block.write(mean, self._mean)

    def _row(self, site: str) -> dict[str, Tensor] | None:
        return self._given if site in self._sites else None

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return dict(self._given or {}), {"given": self._given is not None}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:
        self._given = dict(tensors) if facts["given"] else None


class UniformMean(WeightedMean):
    """θ ← Σ_k θ_k / K over the K sites that answered, whatever their sample counts."""

    uniform = True


def step(blocks: Iterable[tuple[Tensor, Tensor]], rates: Tensors, layout: Layout) -> None:
    """Make d ← θ + η d, with a rate for every tensor or element."""
    places = (block for section in layout.sections for block in section.blocks)
    for (theta, d), block in zip(blocks, places, strict=True):
        torch.addcmul(theta, d, numbers_of(block, rates).to(d.dtype), out=d)


def mixer_of(mix: Mean | Callable[[Any], Aggregator], server: Any) -> Aggregator:
    """Return the mixer of a group. server: what a method finds there (schedule/phase.py)."""
    if isinstance(mix, Mean):
        return WeightedMean() if mix is Mean.OF_CASES else UniformMean()
    return mix(server)
