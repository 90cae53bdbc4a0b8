"""Mixers of methods that give each site values of its own, from those of all: FedSM's and AdaFed's."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused
from medsilo.mixing.forms import Form, PullForm, ServerReadable
from medsilo.mixing.layout import Layout, Tensors
from medsilo.mixing.mixers import Aggregator


class Identity(Aggregator):
    """Every site has its own model, θ_i ← θ_i, with the very tensors that came. Who does not answer keeps it.

    Holds one model per site and, while one arrives, that one and its copy. A site that has answered in the open round
    has no `current` until the round closes: it has had its payload, and its old model makes room for the new one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._sent: dict[str, dict[str, Tensor]] = {}

    @property
    def sealed(self) -> Form:
        """Return how it is mixed where the server cannot read what sites send."""
        return ServerReadable("the server takes each site's values as they are, and does not add them up")

    def sent(self, site: str) -> dict[str, Tensor]:
        """Return what a site has sent in the open round, to be read only; gone when the round closes."""
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

    What comes is copied, and mixed in place when the round closes: every model is held once.
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
    """FedSM Eq. 11: θ_i ← λ θ_i + (1 - λ)/(K - 1) Σ_{j≠i} θ_j, for all K sites that answered at once.

    With m the mean of all K, this is θ_i ← θ_i + (1 - λ) K/(K - 1) · (m - θ_i).

    pull: λ, in (0, 1]: how much of its own model a site keeps. 1 is local training, 1/K the plain mean.
    """

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.pull = pull

    @property
    def sealed(self) -> Form:
        """Return how it is mixed where the server cannot read what sites send."""
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
        """Return how it is mixed where the server cannot read what sites send."""
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
    """Hands the sites' personal models on as they are, to the sites that agreed to that; nothing is sent back.

    Names are "<place>.<name>", by the site's place in sorted order. Of a site that did not agree the common model is
    shown; a site that did not agree is shown its own and, of all others, the common model.
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
        """Return whether a site gets the owner's own model."""
        return owner == site or {owner, site} <= self.agreed()

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        raise Refused(f"{site}: nothing of this group is sent back")


Compare = Callable[[Sequence[str], Mapping[str, Tensors]], Tensor]


class ComparedOnly(Identity):
    """Identity whose rows are only compared with each other: the weights of another group follow from them.

    compare: returns these weights, from the names of all sites in order and what each of them sent.
    """

    def __init__(self, compare: Compare) -> None:
        super().__init__()
        self._compare = compare

    @property
    def sealed(self) -> Form:
        """Return how it is mixed where the server cannot read what sites send."""
        return ServerReadable("the server compares what single hospitals sent")

    def weights(self) -> Tensor:
        """Return the weights that follow from what the sites have sent last."""
        return self._compare(self._sites, {site: self.current(site) for site in self._sites})
