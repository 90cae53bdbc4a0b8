"""Aggregators: θ_i ← Σ_j M_ij θ_j, the server's memory and mathematics for one group of tensors.

An aggregator lives as long as the study. Round after round:

    mixer.start(sites)                    # who takes part in the study
    mixer.current(site)                   # what the site trains from
    mixer.add(site, tensors, weight)      # what the site sends back, in any order
    mixer.finish()                        # `current` is then what each site gets next

The result is the same to the last bit whatever the order of arrival, because sums run over the sites in sorted order.
Running sums have single precision at least. Numbers of integer or boolean type are never averaged: a mean takes them
from the first site that answered, in sorted order; a personal model keeps its own.

The caller must not change tensors that it adds or receives, because the same tensors may be on their way to several
sites. An aggregator changes neither. Calls must come one at a time.
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
from medsilo.mixing.forms import Form, Mean, MeanForm, PullForm, ServerReadable
from medsilo.mixing.layout import Block, Layout, Tensors, numbers_of, spread

if TYPE_CHECKING:
    from medsilo.mixing.defence import Shield

RUNNING = ("running_mean", "running_var")  # torch's names of running statistics


class Aggregator(ABC):
    """A group of tensors across rounds: the sites that may contribute, those that have, and the tensors last sent to
    each.
    """

    def __init__(self) -> None:
        self._sites: list[str] = []
        self._answered: set[str] = set()
        self._layout: Layout | None = None
        # The weight of each contribution in the round that has closed; empty where it is not one number.
        self.shares: Mapping[str, float] = {}

    # -- a round ------------------------------------------------------------------------------------------------------

    def start(self, sites: Iterable[str], initial: Tensors | None = None) -> None:
        """Begin a round, after closing the last.

        Args:
            sites: the names of the study's sites; tensors from earlier rounds stay
            initial: tensors for every site without any; shared, not copied
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
        """Take one site's tensors by name, and their number of samples.

        Their form was checked. Tensors that can't be aggregated raise Refused and change nothing, so the site may send
        again.
        """
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        layout = self._layout or Layout(own)
        self._take(site, own, float(weight), layout)
        self._layout = layout
        self._answered.add(site)
        self._settle()

    @torch.no_grad()
    def finish(self) -> None:
        """Close the round and aggregate the answers; `current` is the result afterwards."""
        if self._answered:
            self._merge()
        self._answered = set()

    def current(self, site: str) -> dict[str, Tensor]:
        """The tensors last sent to a site; answers of the open round do not change them."""
        row = self._row(site)
        if row is None:
            raise MedsiloError(f"{site}: no tensors for this site yet: it neither sent any nor was given any")
        return dict(row)

    # -- between rounds -----------------------------------------------------------------------------------------------

    def state(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The state to save between two rounds: tensors by key, and facts as JSON."""
        tensors, facts = self._save()
        return tensors, {"sites": list(self._sites), **facts}

    def load_state(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore a saved `state`, before any answer of the round; the tensors are shared, not copied."""
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

    # -- construction ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        """Take a valid contribution; change nothing if it fails."""

    @abstractmethod
    def _row(self, site: str) -> dict[str, Tensor] | None:
        """The tensors last sent to the site."""

    def _begin_with(self, initial: dict[str, Tensor]) -> None:  # noqa: B027
        """Take the initial tensors for every site that has none."""

    def _merge(self) -> None:  # noqa: B027
        """Aggregate the answers into the tensors that the sites get."""

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return {}, {}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:  # noqa: B027
        """Restore the result of `_save`."""

    def _settle(self) -> None:  # noqa: B027
        """Do the work that the last contribution has made possible."""


# -- one model for all ------------------------------------------------------------------------------------------------


class WeightedMean(Aggregator):
    """FedAvg: θ ← Σ_k n_k θ_k / Σ_k n_k over the sites that answered; every site gets it, also the others.

    Holds the last mean and, while a round is open, the mean so far. This is the size of two answers (of four in half
    precision), for any number of sites. A contribution waits until the sites before it, in sorted order, have had their
    turn. Until the round closes, `current` is the last mean, also for a site that has answered.

    rate: η_g, the server's step: θ ← θ + η_g (mean - θ). 1 is the mean itself, to the last bit. Running statistics
        always take the mean.
    """

    uniform: bool = False  # whether all sites that answered count alike
    _waits: bool = False  # whether answers are only added when the round closes

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
        """The form of its aggregation where the server cannot read single sites' tensors."""
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
        """True if the answer of this site is added at once."""
        return not self._waits and site == self._sites[self._turn]

    def _settle(self) -> None:
        """Add up the contributions whose turn has come.

        So a round of six models of 28 M parameters closes 9 ms after the last answer, and not 80 ms.
        """
        if not self._waits:
            ready = list(takewhile(self._rows.__contains__, self._sites[self._turn :]))
            self._turn += len(ready)
            self._fold(ready)

    @property
    def _is_mean(self) -> bool:
        """True if the result is the mean itself and not a step towards it."""
        return self.rate == 1.0 and self._shield is None

    @property
    def _origin(self) -> dict[str, Tensor] | None:
        """The last model, where the server makes a step from it: it averages the differences to the sites' models,
        which are short and keep their digits."""
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
        """Combine the waiting answers into the mean, or into the step towards it."""
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
    """Make the aggregator of a group. server: the method's view of the server (schedule/phase.py)."""
    if isinstance(mix, Mean):
        return WeightedMean() if mix is Mean.OF_CASES else UniformMean()
    return mix(server)


# -- values for each site: FedSM's and AdaFed's ------------------------------------------------------------------


class Identity(Aggregator):
    """Every site has its own model, θ_i ← θ_i, without a copy.

    A site that does not answer keeps its model. Memory holds one model per site, and a copy of the one that is
    arriving. A site that has answered in the open round has no `current` until the round closes, because its payload
    was sent and its new model replaces the old.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._sent: dict[str, dict[str, Tensor]] = {}

    @property
    def sealed(self) -> Form:
        """The form of its aggregation where the server cannot read single sites' tensors."""
        return ServerReadable("the server takes each site's values as they are, and does not add them up")

    def sent(self, site: str) -> dict[str, Tensor]:
        """The tensors that a site has sent in the open round, read-only; dropped when the round closes."""
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
            raise MedsiloError(f"{site}: it has answered in this round; its next model comes when the round closes")
        return self._rows.get(site)

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Keys are "<site>/<name>"; a model that several sites share is saved with the first of them."""
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


Rule = Callable[[Tensor], Tensor]  # θ [K, numbers] of the K sites that answered -> the mixed θ, in double precision


class JointAggregator(Identity):
    """θ_i ← f_i(θ_1 .. θ_K), number by number, for those that answered; with one contributor nothing changes.

    Answers are copied, and combined in place when the round closes, so each model is held once.
    """

    @abstractmethod
    def _rule(self, sites: list[str]) -> Rule:
        """The equation for the sites that answered."""

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        super()._take(site, tensors | {name: tensors[name].clone() for name in layout.averaged}, weight, layout)

    def _merge(self) -> None:
        assert self._layout is not None
        sites = sorted(self._sent)
        if len(sites) > 1:
            rule, rows = self._rule(sites), [self._sent[site] for site in sites]
            for section in self._layout.sections:
                for block, theta in section.side_by_side(rows):
                    for own, mixed in zip(rows, rule(theta).to(section.dtype), strict=True):
                        block.write(mixed, own)
        super()._merge()


class SoftPull(JointAggregator):
    """FedSM Eq. 11: θ_i ← λ θ_i + (1 - λ)/(K - 1) Σ_{j≠i} θ_j, over all K sites that answered in the round.

    With m the mean of all K, this is θ_i ← θ_i + (1 - λ) K/(K - 1) · (m - θ_i).

    pull: λ, in (0, 1]: the weight of a site's own model. 1 is local training, 1/K the plain mean.
    """

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.pull = pull

    @property
    def sealed(self) -> Form:
        """The form of its aggregation where the server cannot read single sites' tensors."""
        return PullForm(self.pull)

    def _rule(self, sites: list[str]) -> Rule:
        step = (1 - self.pull) * len(sites) / (len(sites) - 1)

        def pull(theta: Tensor) -> Tensor:
            mean = theta[0] + (theta - theta[0]).mean(0)  # exact where all sites are equal
            return theta.lerp(mean, step)

        return pull


class SimilarityMix(JointAggregator):
    """AdaFed Eq. 2: θ_i ← Σ_j W_ij θ_j, each row of W renormalised over the sites that answered.

    Where no site that counts for site i is there, it keeps its own.

    weights: W [N, N] for the N sites in sorted order, not negative, rows sum to 1.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights.double()

    @property
    def matrix(self) -> Tensor:
        """Return W."""
        return self.weights

    @property
    def sealed(self) -> Form:
        """The form of its aggregation where the server cannot read single sites' tensors."""
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
    """Sends the sites' personal models unchanged to the sites that agreed to share; sites send none back.

    Names are "<place>.<name>", by the site's place in sorted order. The common model replaces that of a site that did
    not agree. Such a site gets its own model, and the common model for all others.
    """

    def __init__(self, personal: Aggregator, common: Aggregator, agreed: Callable[[], Set[str]]) -> None:
        super().__init__()
        self.personal, self.common = personal, common
        self.agreed = agreed  # sites that let each other have their personal models

    def _row(self, site: str) -> dict[str, Tensor]:
        return {
            f"{place}.{name}": tensor
            for place, owner in enumerate(self._sites)
            for name, tensor in (self.personal if self.shows(owner, site) else self.common).current(owner).items()
        }

    def shows(self, owner: str, site: str) -> bool:
        """True if the server sends the owner's model to a site."""
        return owner == site or {owner, site} <= self.agreed()

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        raise Refused(f"{site}: nothing of this group is sent back")


Compare = Callable[[Sequence[str], Mapping[str, Tensors]], Tensor]


class ComparedOnly(Identity):
    """Keeps each site's tensors only to compare them; they determine another group's weights.

    compare: returns these weights, from all sites' names in order and their tensors.
    """

    def __init__(self, compare: Compare) -> None:
        super().__init__()
        self._compare = compare

    @property
    def sealed(self) -> Form:
        """The form of its aggregation where the server cannot read single sites' tensors."""
        return ServerReadable("the server compares what single hospitals sent")

    def weights(self) -> Tensor:
        """The weights that follow from the sites' last tensors."""
        return self._compare(self._sites, {site: self.current(site) for site in self._sites})
