"""Losses in which a rare class counts as much as a frequent one."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medsilo.learning.compute import LossFunction, labels_in
from medsilo.learning.partial_labels import marginal

NEVER = -1e4  # added to a score: its probability is exactly 0, also in half precision


def balanced(counts: Sequence[int]) -> Tensor:
    """Return w_c = N / (K · n_c): each of the K classes that occur counts the same in all, and the mean weight is 1.

    counts: n_c, the training cases (of masks: the places) of each class. A class that does not occur has weight 1.
    """
    known = torch.tensor(counts, dtype=torch.float64)
    here = known > 0
    weights = torch.ones(len(known), dtype=torch.float64)
    weights[here] = known.sum() / (here.sum() * known[here])
    return weights.float()


def weighted(loss: LossFunction, weights: Tensor, share: float) -> LossFunction:
    """Return the loss with w_y in front of the cross entropy of each case or place.

    share: how much cross entropy counts in the loss. ℓ + share · mean((w_y − 1) · CE), which is a mean over cases, so
    that a case by itself has the same weight as in a batch.
    """

    def extra(output: Tensor, target: Tensor, kept: list[int] | None) -> Tensor:
        entropies = cross_entropy(output, target, reduction="none")
        own = weights if kept is None else weights[kept]
        there = own.to(output.device, non_blocking=True)
        return ((there[labels_in(target)] - 1) * entropies).mean()

    def weighted_loss(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) + share * marginal(extra, output, target)

    return weighted_loss


def balanced_softmax(loss: LossFunction, counts: Sequence[int]) -> LossFunction:
    """Return ℓ(z + log n, y): scores z whose softmax is right where all classes are equally frequent.

    counts: n_c, the training cases of each class (Ren et al. 2020). A class that does not occur has probability 0. One
    score of two classes is the second's, against 0 of the first.
    """
    frequent = torch.tensor(counts, dtype=torch.float64)
    shift = torch.where(frequent > 0, frequent.log(), NEVER)

    def balanced_loss(output: Tensor, target: Tensor) -> Tensor:
        known = shift if output.shape[1] > 1 else shift[1:] - shift[0]
        return loss(output + known.to(output, non_blocking=True), target)

    return balanced_loss
