"""A mean whose weights, or whose server step, differ from tensor to tensor or from element to element."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medsilo.core.errors import PlanError
from medsilo.mixing.contributions import Contributions
from medsilo.mixing.forms import Form, ServerReadable
from medsilo.mixing.layout import Layout, Numbers, numbers_of, spread
from medsilo.mixing.mixers import WeightedMean, step

if TYPE_CHECKING:
    from medsilo.mixing.defence import Shield

Weigh = Callable[[str, float], Mapping[str, float | Tensor]]


class MeanByElement(WeightedMean):
    """θ ← θ + η_g (Σ_k w_k θ_k / Σ_k w_k - θ), element by element. What no site weighs stays as it is.

    rate: η_g; a function is asked when the round closes, when groups that were declared earlier are closed.
    weigh: a site's weights in place of its cases, from its name and cases; asked when its tensors come. They take one
        parcel more, and wait for their turn as its tensors do.
    """

    _is_mean = False

    def __init__(
        self, rate: float | Callable[[], Numbers] = 1.0, weigh: Weigh | None = None, uniform: bool = False
    ) -> None:
        self._spreads = Contributions()
        self._rates = rate if callable(rate) else None
        super().__init__(1.0 if callable(rate) else rate)
        self.weigh, self.uniform = weigh, uniform

    @property
    def sealed(self) -> Form:
        return ServerReadable("its weights follow from the tensors themselves") if self.weigh else super().sealed

    def defend(self, shield: "Shield") -> None:
        if self.weigh:
            raise PlanError("mixing: a mean with weights of its own for every tensor can't be made robust")
        super().defend(shield)

    def _begin_sum(self) -> None:
        super()._begin_sum()
        self._spreads.clear()
        self._totals: dict[str, Tensor] = {}  # of the weights, in place of one number

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        if self.weigh:
            weights = spread(self.weigh(site, 1.0 if self.uniform else weight), layout)
            self._spreads.put(site, weights, layout.averaged, self._is_next(site))
        super()._take(site, tensors, weight, layout)
        if self.weigh:
            del self._numbers[site]

    def _fold(self, sites: list[str]) -> None:
        """m ← m + w / Σw · (θ - m), with weights w for every element; 0 where nobody weighs anything."""
        if not self.weigh or not sites:
            super()._fold(sites)
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

    def _move(self, blocks: Iterator[tuple[Tensor, Tensor]], layout: Layout) -> None:
        if self._rates:
            step(blocks, spread(self._rates(), layout), layout)
        else:
            super()._move(blocks, layout)
