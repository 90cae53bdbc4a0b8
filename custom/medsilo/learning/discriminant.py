"""Compute the last layer of a network that predicts a case's hospital: Fisher's linear discriminant in closed form.

If one hospital trained a network for predicting hospitals with gradient steps, the network would learn to predict only
this hospital. Instead of taking gradient steps, each hospital sends sums of features over its cases once, and the
server computes the discriminant from the sums.
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

# Covariances between features are reduced by this fraction, because a few cases estimate covariances badly.
SHRINKAGE = 0.1
# minimum variance of a feature, as a fraction of the mean square of all features; smaller variances are raised to the
# minimum
LEAST = 1e-6
ROUNDED = 1e-4  # a sum of features below this threshold counts as 0, because secure aggregation rounds sums
NEVER = -1e4  # output of the discriminant for a hospital that sent no sums of features


class FeatureSums(nn.Module):
    """The sums of features over one hospital's cases, which this hospital sends.

    The tensor `present` [sites] is 1 in the hospital's own row and 0 in the rows of all other hospitals. The tensor
    `means` [sites, features] contains the hospital's mean features in the hospital's own row, and 0 in the rows of
    other hospitals. The tensor `products` [features, features] contains the mean product of each pair of features.

    The sums have double precision, because the discriminant subtracts large values that are nearly equal.
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
    def collecting(self, network: nn.Module, index: int) -> Iterator[TrainStep]:
        """Yield a training step that adds the features of a batch to the sums of features, and that changes no weight.

        Args:
            network: A feature is an input of its last layer.
            index: The index of the hospital's row.
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
        self.present[index] = 1
        self.means[index] = mean / cases
        self.products.copy_(products / cases)


def tell_hospitals_apart(network: nn.Module, sums: Tensors) -> None:
    if not bool((sums["present"] > ROUNDED).any()):
        return
    (head,) = cast(list[nn.Linear], head_layers(network))
    weight, bias = discriminant(sums["present"], sums["means"], sums["products"])
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def discriminant(present: Tensor, means: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights [sites, features] and the biases [sites] of a linear discriminant between hospitals.

    The discriminant assumes that all hospitals have the same prior probability and the same covariance. The
    discriminant never predicts a hospital that sent no sums.
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
    """Raise Refused if tensors are neither one hospital's sums of features nor a mean of such sums over hospitals."""
    present, means = tensors["present"], tensors["means"]
    if float((present.sum() - 1).abs()) > ROUNDED or float(present.min()) < -ROUNDED:
        raise Refused("sums/present does not name exactly one hospital")
    if bool((means[present <= ROUNDED].abs() > ROUNDED).any()):
        raise Refused("sums/means holds features of other hospitals")
    if float(tensors["products"].diagonal().min()) < -ROUNDED:
        raise Refused("sums/products has a mean square below zero")
