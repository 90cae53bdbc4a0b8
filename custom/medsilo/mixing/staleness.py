"""Weighted means whose weights are known only when a round closes, so that the aggregator stores answers until then."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from medsilo.mixing.aggregators import Identity, WeightedMean
from medsilo.mixing.layout import Tensors
from medsilo.mixing.mean_forms import Form, ServerReadable
from medsilo.mixing.rules import capped

# smallest normalised weight; a site with weight zero would get nothing when the excess over a cap is divided among
# sites
LEAST = 1e-9
Shares = Mapping[str, float]


class StalenessWeightedMean(WeightedMean):
    """The mean θ ← Σ_k a_k θ_k over the sites that answered, with weights a that depend on all answers of the round.

    Args:
        late: a function of this aggregator that returns the weight of every site that answered; the function may use
            `products`, and groups that were declared earlier, because their rounds are closed
        scale: a function, called after `late`, that returns the factor by which each tensor's mean is multiplied
    """

    _waits = True

    def __init__(
        self,
        late: Callable[["StalenessWeightedMean"], Shares],
        scale: Callable[["StalenessWeightedMean"], Shares] | None = None,
    ) -> None:
        super().__init__()
        self._late, self._scale = late, scale
        # for each site, the numbers that the weight function keeps from round to round
        self.memory: dict[str, dict[str, float]] = {}

    @property
    def sealed(self) -> Form:
        return ServerReadable("how much each hospital counts follows from what all of them send")

    @property
    def samples(self) -> Shares:
        """Return the number of cases of each site that answered in the open round; the sites are in sorted order."""
        return dict(sorted(self._numbers.items()))

    @property
    def averaged(self) -> list[str]:
        assert self._layout is not None
        return self._layout.averaged

    def _merge(self) -> None:
        weights = {site: float(weight) for site, weight in self._late(self).items()}
        scales = self._scale(self) if self._scale else {}
        self._numbers = weights
        self._rows.drop(site for site, weight in weights.items() if not weight)
        super()._merge()
        assert self._given is not None
        for name, scale in scales.items():
            mean = self._given[name]
            self._given[name] = (mean.double() * scale).to(mean.dtype)

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        tensors, facts = super()._save()
        return tensors, {**facts, "memory": {site: dict(own) for site, own in self.memory.items()}}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:
        super()._load(tensors, facts)
        self.memory = {site: dict(own) for site, own in facts["memory"].items()}

    def models(self) -> Iterator[tuple[str, Tensors]]:
        sites = sorted(self._numbers)
        return zip(sites, self._rows.each(sites), strict=True)

    def products(self, part: Callable[[str], str] = lambda name: "all") -> dict[str, Tensor]:
        """Return the inner products [1 + K, 1 + K] of the model before the round and the K sites' differences from this
        model. The rows and columns for sites are in the sorted order of sites. The function returns one matrix for each
        part of the model, which sums the inner products over the part's tensors.
        """
        found: dict[str, Tensor] = {}
        assert self._layout is not None and self._given is not None
        for section in self._layout.sections:
            for block, rows in self._rows.columns(sorted(self._numbers), section, self._given):
                for piece, columns in zip(block.pieces, rows.split(block.sizes, 1), strict=True):
                    size = len(columns)
                    sums = found.setdefault(part(piece.name), torch.zeros(size, size, dtype=torch.float64))
                    for place, row in enumerate(columns):
                        sums[place, place:] += (row * columns[place:]).sum(1)
        return {key: sums + sums.triu(1).T for key, sums in found.items()}


def at_most(weights: Shares, largest: float) -> dict[str, float]:
    """Normalise the weights, and cap each normalised weight. If all weights are zero, all sites get equal normalised
    weights.

    Args:
        weights: the weight of each site
        largest: limit on a normalised weight
    """
    values = torch.tensor(list(weights.values()), dtype=torch.float64)
    shares = values / values.sum() if values.any() else torch.full_like(values, 1 / len(values))
    if shares.max() > largest:
        shares = capped(shares.clamp(min=LEAST), largest)
    return dict(zip(weights, shares.tolist(), strict=True))


class SharedNumbers(Identity):
    """Numbers that every site sends. The server replaces some of a site's numbers, and returns all of them to the site.

    For a site that did not train, all numbers are 0.

    Args:
        answer: a function, called when the round closes, that returns the server's numbers for a site by name
    """

    def __init__(self, answer: Callable[[str], Shares]) -> None:
        super().__init__()
        self._answer = answer

    def _merge(self) -> None:
        super()._merge()
        for site, row in self._rows.items():
            numbers = {name: torch.full_like(row[name], value) for name, value in self._answer(site).items()}
            self._rows[site] = row | numbers

    def _row(self, site: str) -> dict[str, Tensor] | None:
        row = super()._row(site)
        if row is None and self._rows and site not in self._sites:
            return {name: torch.zeros_like(tensor) for name, tensor in self.current(self._sites[0]).items()}
        return row
