"""Compute a last layer in closed form: Fisher's linear discriminant between hospitals, from sums over their cases.

A classifier of hospitals has one label per site, and gradient steps at a site would teach it to predict always that
label. Each hospital's sums of features are exchanged once instead; they suffice for a discriminant over all cases.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from medsilo.core.errors import Refused
from medsilo.core.tensors import Tensors
from medsilo.learning.layers import head_layers
from medsilo.learning.loop import TrainStep, Watch
from medsilo.learning.steps import frozen_features

SHRINKAGE = 0.1  # factor that shrinks covariances of features, which few cases estimate badly
LEAST = 1e-6  # smallest variance of a feature, as a share of the features' mean square
ROUNDED = 1e-4  # sums below this count as 0, because secure aggregation rounds them
NEVER = -1e4  # logit of a hospital without sums


class FeatureSums(nn.Module):
    """The sums of one hospital's features, which leave for `discriminant`.

    `present` [sites] and `means` [sites, features] are 0 except in the hospital's row. `products` [features, features]
    is the mean over its cases of products of two features.

    `discriminant` needs their unweighted mean over hospitals. All sums have double precision, because `discriminant`
    subtracts large numbers that are nearly equal.
    """

    present: Tensor
    means: Tensor
    products: Tensor

    def __init__(self, sites: int, features: int) -> None:
        super().__init__()
        self.register_buffer("present", torch.zeros(sites, dtype=torch.float64))
        self.register_buffer("means", torch.zeros(sites, features, dtype=torch.float64))
        self.register_buffer("products", torch.zeros(features, features, dtype=torch.float64))

    @contextmanager
    def collecting(self, network: nn.Module, place: int) -> Iterator[TrainStep]:
        """Yield a step that changes no weight; after the block, the sums cover all cases that it has seen.

        Features are the inputs of the network's last layer. place: the index of the hospital's row.
        """
        mean, products, cases = torch.zeros_like(self.means[0]), torch.zeros_like(self.products), 0

        @torch.no_grad()
        def collect(inputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal cases
            features = frozen_features(network, inputs).double()
            mean.add_(features.sum(0))
            products.add_(features.T @ features)
            cases += len(features)
            return mean.new_zeros(())

        yield Watch(collect)
        for sums in (self.present, self.means, self.products):
            sums.zero_()
        self.present[place] = 1
        self.means[place] = mean / cases
        self.products.copy_(products / cases)


def tell_hospitals_apart(network: nn.Module, sums: Tensors) -> None:
    """Set the network's last layer to the discriminant of these mean sums, if any hospital sent sums."""
    if not bool((sums["present"] > ROUNDED).any()):
        return
    (head,) = cast(list[nn.Linear], head_layers(network))
    weight, bias = discriminant(sums["present"], sums["means"], sums["products"])
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def discriminant(present: Tensor, means: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [sites, features] and biases [sites] of a linear discriminant between hospitals.

    All hospitals have the same prior and covariance. A hospital without sums is never predicted.
    """
    known = present > ROUNDED
    centres = means[known] / present[known, None]
    shares = present[known] / present[known].sum()
    within = products - centres.T @ (shares[:, None] * centres)
    variances = within.diagonal().clamp(min=LEAST * float(products.diagonal().mean()) + torch.finfo(means.dtype).tiny)
    within = (1 - SHRINKAGE) * within
    within.diagonal().copy_(variances)
    solved = torch.linalg.solve(within, centres.T).T
    offsets = -(solved * centres).sum(1) / 2
    weight, bias = torch.zeros_like(means), torch.full_like(present, NEVER)
    weight[known] = solved - solved.mean(0)
    bias[known] = offsets - offsets.mean()
    return weight, bias


def is_of_one_hospital(tensors: Mapping[str, Tensor]) -> None:
    """Raise Refused unless these are the sums of one hospital, or a mean of them under secure aggregation."""
    present, means = tensors["present"], tensors["means"]
    if float((present.sum() - 1).abs()) > ROUNDED or float(present.min()) < -ROUNDED:
        raise Refused("sums/present does not name one hospital")
    if bool((means[present <= ROUNDED].abs() > ROUNDED).any()):
        raise Refused("sums/means holds features of other hospitals")
    if float(tensors["products"].diagonal().min()) < -ROUNDED:
        raise Refused("sums/products has a mean square below zero")
