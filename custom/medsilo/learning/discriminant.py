"""A last layer in closed form: the linear discriminant of hospitals, from sums over all of their cases (Fisher 1936).

Whoever sees one label only can learn nothing by steps but to name it. Means over each hospital's features add up to
what a classifier trained on all cases together would use, whoever holds how many of them, and after one exchange.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from medsilo.core.errors import Refused
from medsilo.learning.layers import head_layers
from medsilo.learning.loop import TrainStep, Watch
from medsilo.learning.steps import frozen_features

SHRINKAGE = 0.1  # share of the features' covariances that is taken for chance, as few cases can't tell them
LEAST = 1e-6  # share of the features' mean square that a feature varies by at least
ROUNDED = 1e-4  # what lies nearer to nothing is nothing: sums that were sealed are rounded
NEVER = -1e4  # score of a hospital of which nothing is known


class FeatureSums(nn.Module):
    """The sums of one hospital: `present` [sites] and `means` [sites, features], 0 but in its own row; `products`
    [features, features], the mean of products of its cases' features.

    The mean over hospitals, each counting alike, holds all that `discriminant` needs. In double precision, as small
    differences between large numbers decide.
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
        """Give a lesson that changes no weight; afterwards hold the sums over the cases of all batches that it met.

        Features are what the network's last layer is given. place: the hospital's.
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


def tell_hospitals_apart(network: nn.Module, sums: FeatureSums) -> None:
    """Make the network's last layer the discriminant of these mean sums; where nobody gave any it stays as it is."""
    if not bool((sums.present > ROUNDED).any()):
        return
    (head,) = cast(list[nn.Linear], head_layers(network))
    weight, bias = discriminant(sums.present, sums.means, sums.products)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def discriminant(present: Tensor, means: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [sites, features] and biases [sites], of log-likelihoods under one covariance.

    Hospitals are equally likely. One that is not present is never named.
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
    """Raise Refused when neither a hospital's cases have such sums nor, where they were sealed, several hospitals'."""
    present, means = tensors["present"], tensors["means"]
    if float((present.sum() - 1).abs()) > ROUNDED or float(present.min()) < -ROUNDED:
        raise Refused("sums/present does not name one hospital")
    if bool((means[present <= ROUNDED].abs() > ROUNDED).any()):
        raise Refused("sums/means holds features of other hospitals")
    if float(tensors["products"].diagonal().min()) < -ROUNDED:
        raise Refused("sums/products has a mean square below zero")
