"""A weighted mean over sites, in which a site has a separate weight for each tensor or each element of a tensor."""

from collections.abc import Callable

import torch
from torch import Tensor

from medsilo.core.errors import PlanError
from medsilo.mixing.aggregators import WeightedMean
from medsilo.mixing.contributions import Contributions
from medsilo.mixing.layout import Layout, Numbers, numbers_of, spread
from medsilo.mixing.mean_forms import Form, ServerReadable


class MeanByElement(WeightedMean):
    """The aggregation θ ← Σ_k w_k θ_k / Σ_k w_k, computed for each element. Elements of θ stay unchanged where all
    sites have weight zero.

    Args:
        weigh: a function that returns a site's weights, given the site's name and number of cases
        rate: the server's step size; 1 gives the mean itself
    """

    _is_mean = False

    def __init__(self, weigh: Callable[[str, float], Numbers], rate: float = 1.0, uniform: bool = False) -> None:
        self._spreads = Contributions()
        super().__init__(rate)
        self.weigh, self.uniform = weigh, uniform

    @property
    def sealed(self) -> Form:
        return ServerReadable("its weights follow from the tensors themselves")

    def defend(self, shield: object) -> None:
        raise PlanError("mixing: a mean with different weights for every tensor can't use a robust rule")

    def _begin_sum(self) -> None:
        super()._begin_sum()
        self._spreads.clear()
        self._totals: dict[str, Tensor] = {}  # for each element, the sum of the sites' weights

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        weights = spread(self.weigh(site, 1.0 if self.uniform else weight), layout)
        self._spreads.put(site, weights, layout.averaged, self._is_next(site))
        super()._take(site, tensors, weight, layout)
        del self._numbers[site]

    def _fold(self, sites: list[str]) -> None:
        """Update the mean m ← m + w / Σw · (θ - m), where each element has its own weight w. An element of the mean is
        0 if all weights of the element are 0.
        """
        if not sites:
            return
        assert self._layout is not None
        if not self._totals:
            self._mean = {name: mean.zero_() for name, mean in self._layout.rooms().items()}
            self._totals = {name: torch.zeros_like(mean) for name, mean in self._mean.items()}
        origin = self._origin
        for row, weights in zip(self._rows.each(sites), self._spreads.each(sites), strict=True):
            for block, theta, mean in self._beside(row, self._layout):
                if origin is not None:
                    block.subtract(origin, theta)
                total = torch.cat(block.flat(self._totals))
                own = numbers_of(block, weights).to(total.dtype)
                block.write(total.add_(own), self._totals)
                share = torch.where(total > 0, own.double() / total.double(), 0.0)
                mean.lerp_(theta, share.to(mean.dtype))
        self._rows.drop(sites)
        self._spreads.drop(sites)
