"""FedSM's mean of the hospitals' feature sums; if a hospital sends no feature sums in a round, its last feature sums
count.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medsilo.mixing.aggregators import UniformMean
from medsilo.mixing.layout import Layout, Tensors
from medsilo.mixing.mean_forms import Form, MeanForm


class LastSums(UniformMean):
    """The mean of the last feature sums of all hospitals that have ever sent feature sums.

    The last feature sums of a hospital stay valid, because frozen layers compute the features.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, dict[str, Tensor]] = {}

    @property
    def sealed(self) -> Form:
        return MeanForm(weighted=False)

    def take_mean(self, tensors: Tensors, weights: Mapping[str, float]) -> None:
        super().take_mean(tensors, weights)
        self._last |= {site: _of_one(tensors, self._sites.index(site), len(weights)) for site in weights}

    def _take(self, site: str, tensors: dict[str, Tensor], weight: float, layout: Layout) -> None:
        super()._take(site, tensors, weight, layout)
        self._last[site] = tensors

    def _merge(self) -> None:
        last = {site: self._last[site] for site in self._sites if site in self._last}
        if last.keys() > self._numbers.keys():
            self._begin_sum()
            for site, sums in last.items():
                self._rows.put(site, sums, sums)
                self._numbers[site] = 1.0
        super()._merge()

    def _save(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        mean, facts = super()._save()
        of_each = {f"{site}/{name}": tensor for site, sums in self._last.items() for name, tensor in sums.items()}
        return {**mean, **of_each}, {**facts, "last": sorted(self._last)}

    def _load(self, tensors: Mapping[str, Any], facts: dict[str, Any]) -> None:
        super()._load({name: tensor for name, tensor in tensors.items() if "/" not in name}, facts)
        self._last = {site: {} for site in facts["last"]}
        for key, tensor in tensors.items():
            if "/" in key:
                site, name = key.split("/", 1)
                self._last[site][name] = tensor


def _of_one(mean: Tensors, index: int, hospitals: int) -> dict[str, Tensor]:
    """Estimate one hospital's feature sums from the mean of feature sums over hospitals, because secure aggregation
    hides single hospitals.

    The mean of feature sums contains the hospital's mean features as one row. The hospital's covariance is unknown, so
    the function uses the pooled covariance within hospitals.
    """
    here = torch.zeros_like(mean["present"])
    here[index] = 1
    rows = hospitals * mean["means"]
    means = rows * here[:, None]
    within = mean["products"] - rows.T @ rows / hospitals
    return {"present": here, "means": means, "products": within + means.T @ means}
