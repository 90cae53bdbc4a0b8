"""Aggregators, which run at the server and combine the sites' tensors of one group: θ_i ← Σ_j M_ij θ_j.

An aggregator exists as long as the study. In each round, the server makes the following calls:

    aggregator.start(sites)                    # who takes part in the study
    aggregator.current(site)                   # the tensors from which the site trains
    aggregator.add(site, tensors, weight)      # the tensors that the site sends back, in any order
    aggregator.finish()                        # `current` then returns the tensors for the site's next round

Sums run over the sites in sorted order, so that the order in which answers arrive does not change even the last bit.
A sum that grows answer by answer has at least single precision. Integers and booleans are never averaged: a mean copies
them from the first site in sorted order, and a personal model keeps its own values.

The caller of an aggregator must not change tensors that it adds or receives, because several sites may get the same
tensors. An aggregator does not change a tensor after receiving or returning it. An aggregator is not safe for calls
from several threads.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, PlanError, Refused
from medsilo.mixing.contributions import Contributions, fold
from medsilo.mixing.layout import Block, Layout, Tensors, numbers_of, spread
from medsilo.mixing.mean_forms import Form, Mean, MeanForm, PullForm, ServerReadable

if TYPE_CHECKING:
    from medsilo.mixing.defence import Shield

RUNNING = ("running_mean", "running_var")  # endings of the names of running statistics in torch


class Aggregator(ABC):
    """Aggregates one group of tensors in every round. The aggregator knows the sites that may send tensors, and stores
    the tensors that the server last sent to each site.

    >>> mean = UniformMean()
    >>> mean.start(["a", "b"])
    >>> mean.add("a", {"bias": torch.zeros(2)}, weight=30)
    >>> mean.add("b", {"bias": torch.ones(2)}, weight=10)
    >>> mean.finish()
    >>> mean.current("a")
    {'bias': tensor([0.5000, 0.5000])}
    """

    def __init__(self) -> None:
        self._sites: list[str] = []
        self._answered: set[str] = set()
        self._layout: Layout | None = None
        # The weight of each site's answer in the last closed round; empty if a site's weight differs between tensors.
        self.shares: Mapping[str, float] = {}

    # -- a round ------------------------------------------------------------------------------------------------------

    def start(self, sites: Iterable[str], initial: Tensors | None = None) -> None:
        """Close the last round, and begin a new round; at first, each site still has its tensors from earlier rounds.

        Args:
            sites: names of the sites that may answer
            initial: tensors, which are not copied, for every site that has no tensors yet
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
        """Store the tensors of one site.

        If the tensors can't be aggregated, the method raises Refused and changes nothing, so that the site may send
        tensors again.

        Args:
            site: the site's name
            tensors: tensors whose names, shapes and data types the caller has checked
            weight: the site's weight, such as its number of samples
        """
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        layout = self._layout or Layout(own)
        self._take(site, own, float(weight), layout)
        self._layout = layout
        self._answered.add(site)
        self._settle()

    @torch.no_grad()
    def finish(self) -> None:
        """Close the round, and aggregate the round's answers."""
        if self._answered:
            self._merge()
        self._answered = set()

    def current(self, site: str) -> dict[str, Tensor]:
        """Return the tensors last sent to a site; answers in the open round do not change these tensors."""
        row = self._row(site)
        if row is None:
            raise MedsiloError(f"{site}: the site has no tensors yet, because it neither sent nor received tensors")
        return dict(row)

    # -- between rounds -----------------------------------------------------------------------------------------------

    def state(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        tensors, facts = self._save()
        return tensors, {"sites": list(self._sites), **facts}

    def load_state(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore a saved state. The caller must do this before the first answer of a round.

        Args:
            tensors, facts: the two values that `state` returned; the tensors are not copied
        """
        self.finish()
        self._load(tensors, facts)
        self._sites = list(facts["sites"])

    @property
    def matrix(self) -> Tensor | None:
        return None

    def defend(self, shield: "Shield") -> None:
        raise PlanError(f"mixing: {type(self).__name__} is not a mean that a robust rule can replace")

    # -- construction ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        """Store a valid answer; if this method fails, the aggregator must be unchanged."""

    @abstractmethod
    def _row(self, site: str) -> dict[str, Tensor] | None:
        """Return the tensors that the server last sent to the site."""

    def _begin_with(self, initial: dict[str, Tensor]) -> None:  # noqa: B027
        """Use the initial tensors for every site that has no tensors yet."""

    def _merge(self) -> None:  # noqa: B027
        """Aggregate the answers into the tensors that are sent to the sites."""

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return {}, {}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state that `_save` returned."""

    def _settle(self) -> None:  # noqa: B027
        """Add the answers that no longer have to wait for the answer of another site."""


# -- aggregation into one model for all sites --------------------------------------------------------------------------


class WeightedMean(Aggregator):
    """FedAvg: θ ← Σ_k n_k θ_k / Σ_k n_k over the sites that answered. Every site of the study receives the mean that
    FedAvg computes.

    The aggregator stores the last mean and, while a round is open, the mean of the answers so far. For any number of
    sites, the stored tensors need as much memory as two answers, or as four answers if answers have half precision.
    Answers are added in the sorted order of sites, so an answer may have to wait for the answers of other sites. Until
    the round closes, every site receives the last mean, even if the site has already answered.

    Args:
        rate: η_g, the size of the server's step θ ← θ + η_g (mean - θ), which running statistics do not use; 1 gives
            exactly the mean
    """

    uniform: bool = False
    _waits: bool = False  # True if answers are added only when the round closes

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.rate = rate
        self._given: dict[str, Tensor] | None = None
        self._rows = Contributions()
        self._shield: Shield | None = None
        self._begin_sum()

    def defend(self, shield: "Shield") -> None:
        """From now on, combine the sites' answers by the plan's robust rule when a round closes. If the server takes a
        step, the step follows the update that the robust rule returns.
        """
        self._shield, self._waits = shield, True

    @property
    def sealed(self) -> Form:
        return MeanForm(weighted=not self.uniform)

    def take_mean(self, tensors: Tensors, weights: Mapping[str, float]) -> None:
        """Use a mean that was computed elsewhere, as if each site had sent this mean.

        Args:
            tensors: the mean
            weights: the weight of each site in the mean
        """
        first, *others = sorted(weights)
        self.add(first, tensors, math.fsum(weights.values()))
        self._answered |= set(others)
        self._numbers = dict(weights)

    def _begin_sum(self) -> None:
        self._rows.clear()
        # the weight of each site that has answered; not used if weights differ between elements
        self._numbers = dict[str, float]()
        self._turn = 0  # index of the site whose answer is added next
        self._total = 0.0
        self._mean: dict[str, Tensor] = {}  # the mean of the answers so far, in at least single precision
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
        return not self._waits and site == self._sites[self._turn]

    def _settle(self) -> None:
        """Add all answers that do not have to wait for the answer of another site.

        With six models of 28 M parameters, a round closes 9 ms after the last answer. Without additions on arrival, a
        round would close 80 ms after the last answer.
        """
        if not self._waits:
            ready = list(takewhile(self._rows.__contains__, self._sites[self._turn :]))
            self._turn += len(ready)
            self._fold(ready)

    @property
    def _is_mean(self) -> bool:
        return self.rate == 1.0 and self._shield is None

    @property
    def _origin(self) -> dict[str, Tensor] | None:
        """If the server takes a step from the last model, return the last model; otherwise, return None. A server that
        takes a step averages the sites' differences from the last model, because small numbers lose less precision than
        large numbers.
        """
        return None if self._is_mean else self._given

    def _fold(self, sites: list[str]) -> None:
        """Add the sites' models, or the models' differences from the last model, to the mean so far.

        If all tensors are equal, the mean is exactly equal to each tensor.
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
        self._given = origin = None  # frees memory
        self._given = self._layout.narrowed(self._mean, self._carried)
        self._begin_sum()

    def _combine(self, shield: "Shield", layout: Layout) -> None:
        self._mean, shares = shield.combined(self._rows, self._numbers, layout, self._given)
        self._carried = shield.carried(self._rows.each(self._numbers), layout)
        self._numbers = shares
        self._rows.clear()

    def _move(self, blocks: Iterator[tuple[Tensor, Tensor]], layout: Layout) -> None:
        """Take the server's step d ← θ + η_g d from the last model θ, where d is the mean update."""
        if self.rate == 1.0 or not any(name.endswith(RUNNING) for name in layout.averaged):
            for theta, d in blocks:
                torch.add(theta, d, alpha=self.rate, out=d)
            return
        # Running statistics become the mean over sites, because a step beyond the mean could make a variance negative.
        rates = {name: 1.0 if name.endswith(RUNNING) else self.rate for name in layout.averaged}
        step(blocks, spread(rates, layout), layout)

    def _beside(self, model: Tensors, layout: Layout) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield blocks of a model and of the mean in double precision; callers change the mean in place."""
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
    """The aggregation θ ← Σ_k θ_k / K over the K sites that answered, regardless of the sites' numbers of cases."""

    uniform = True


def step(blocks: Iterable[tuple[Tensor, Tensor]], rates: Tensors, layout: Layout) -> None:
    """Compute d ← θ + η d in place, where η is a separate rate for each tensor or element."""
    places = (block for section in layout.sections for block in section.blocks)
    for (theta, d), block in zip(blocks, places, strict=True):
        torch.addcmul(theta, d, numbers_of(block, rates).to(d.dtype), out=d)


def aggregator_of(mix: Mean | Callable[[Any], Aggregator], server: Any) -> Aggregator:
    if isinstance(mix, Mean):
        return WeightedMean() if mix is Mean.OF_CASES else UniformMean()
    return mix(server)


# -- aggregation into a personal model for each site, as in FedSM and AdaFed -------------------------------------------


class Identity(Aggregator):
    """Every site keeps its own model, θ_i ← θ_i, and the aggregator makes no copy.

    The model of a site that does not answer stays unchanged. Memory holds one model per site, and a second model for
    the site whose answer is arriving. After a site has answered, its model is not available until the round closes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._sent: dict[str, dict[str, Tensor]] = {}

    @property
    def sealed(self) -> Form:
        return ServerReadable("the server takes each site's values as they are, and does not add them up")

    def sent(self, site: str) -> dict[str, Tensor]:
        """Return the tensors that a site has sent in the open round; these tensors are deleted when the round
        closes.
        """
        return dict(self._sent[site])

    def _begin_with(self, initial: dict[str, Tensor]) -> None:
        for site in self._sites:
            self._rows.setdefault(site, initial)

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        self._sent[site] = tensors
        self._rows.pop(site, None)

    def _merge(self) -> None:
        self._rows |= self._sent
        self._sent = {}

    def _row(self, site: str) -> dict[str, Tensor] | None:
        if site in self._sent:
            raise MedsiloError(
                f"{site}: the site has answered in this round; the next model is available when the round closes"
            )
        return self._rows.get(site)

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return the state with keys "<site>/<name>"; a model that several sites share is saved once, under the first
        of these sites.
        """
        tensors: dict[str, Tensor] = {}
        owners: dict[int, str] = {}
        same: dict[str, str] = {}
        for site, row in sorted(self._rows.items()):
            same[site] = owners.setdefault(id(row), site)
            if same[site] == site:
                tensors |= {f"{site}/{name}": tensor for name, tensor in row.items()}
        return tensors, {"rows": same}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:
        rows: dict[str, dict[str, Tensor]] = {owner: {} for owner in facts["rows"].values()}
        for key, tensor in tensors.items():
            owner, name = key.split("/", 1)
            rows[owner][name] = tensor
        self._rows = {site: rows[owner] for site, owner in facts["rows"].items()}


# maps the models θ [K, values] of the K sites that answered to the mixed models θ in double precision
Rule = Callable[[Tensor], Tensor]


class JointAggregator(Identity):
    """The aggregation θ_i ← f_i(θ_1, …, θ_K), computed for each element, for the K sites that answered. If only one
    site answered, this site's model stays unchanged.

    The server keeps one copy of each site's model until the round closes, and then averages within these copies.
    """

    @abstractmethod
    def _rule(self, sites: list[str]) -> Rule:
        """Return the equation that mixes the models of the given sites, which are the sites that answered."""

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        super()._take(site, tensors | {name: tensors[name].clone() for name in layout.averaged}, weight, layout)

    def _merge(self) -> None:
        assert self._layout is not None
        sites = sorted(self._sent)
        if len(sites) > 1:
            rule, rows = self._rule(sites), [self._sent[site] for site in sites]
            for section in self._layout.sections:
                for block, theta in section.side_by_side(rows):
                    for row, mixed in zip(rows, rule(theta).to(section.dtype), strict=True):
                        block.write(mixed, row)
        super()._merge()


class SoftPull(JointAggregator):
    """FedSM Equation 11: θ_i ← λ θ_i + (1 - λ)/(K - 1) Σ_{j≠i} θ_j, over all K sites that answered in the round.

    With the mean m of all K sites, Equation 11 is θ_i ← θ_i + (1 - λ) K/(K - 1) · (m - θ_i).

    Args:
        pull: λ in (0, 1], the weight of a site's own model; 1 is local training, and 1/K is the plain mean
    """

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.pull = pull

    @property
    def sealed(self) -> Form:
        return PullForm(self.pull)

    def _rule(self, sites: list[str]) -> Rule:
        step = (1 - self.pull) * len(sites) / (len(sites) - 1)

        def pull(theta: Tensor) -> Tensor:
            # written as a difference, so that the mean is exact if all sites have equal values
            mean = theta[0] + (theta - theta[0]).mean(0)
            return theta.lerp(mean, step)

        return pull


class SimilarityMix(JointAggregator):
    """AdaFed Equation 2: θ_i ← Σ_j W_ij θ_j, where each row of W is normalised over the sites that answered.

    Site i keeps its model if no site that has a positive weight for it has answered.

    Args:
        weights: W [N, N] for the N sites in sorted order, without negative numbers; each row sums to 1
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights.double()

    @property
    def matrix(self) -> Tensor:
        return self.weights

    @property
    def sealed(self) -> Form:
        return ServerReadable(
            "each hospital gets a mixture of its own, and half of them can solve for the others from theirs"
        )

    def _rule(self, sites: list[str]) -> Rule:
        here = [place for place, site in enumerate(self._sites) if site in sites]
        weights = self.weights[here][:, here]
        mass = weights.sum(1, keepdim=True)
        weights = torch.where(mass > 0, weights / mass, torch.eye(len(here), dtype=weights.dtype))
        return lambda theta: weights @ theta


class PersonalModelPool(Aggregator):
    """Send the sites' personal models unchanged to the sites that agreed to share them. In the exchange of personal
    models, sites send no models back to the server.

    Tensor names are "<index>.<name>", where the index is the position of the model's owner among the sorted sites. A
    site that did not agree to share receives its own personal model, and the common model in place of all other
    personal models.
    """

    def __init__(self, personal: Aggregator, common: Aggregator, agreed: Callable[[], Set[str]]) -> None:
        super().__init__()
        self.personal, self.common = personal, common
        self.agreed = agreed  # a function that returns the sites that agreed to exchange their personal models

    def _row(self, site: str) -> dict[str, Tensor]:
        return {
            f"{place}.{name}": tensor
            for place, owner in enumerate(self._sites)
            for name, tensor in (self.personal if self.shows(owner, site) else self.common).current(owner).items()
        }

    def shows(self, owner: str, site: str) -> bool:
        return owner == site or {owner, site} <= self.agreed()

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        raise Refused(f"{site}: sites send no tensors of this group")


Compare = Callable[[Sequence[str], Mapping[str, Tensors]], Tensor]


class ComparedOnly(Identity):
    def __init__(self, compare: Compare) -> None:
        super().__init__()
        self._compare = compare

    @property
    def sealed(self) -> Form:
        return ServerReadable("the server compares what single hospitals sent")

    def weights(self) -> Tensor:
        return self._compare(self._sites, {site: self.current(site) for site in self._sites})
