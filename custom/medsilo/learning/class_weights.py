"""Loss functions in which a class with few cases has as much influence as a class with many cases."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medsilo.learning.compute import LossFunction, labels_in
from medsilo.learning.partial_labels import marginal

NEVER = -1e4  # a logit to which this constant was added gets a softmax probability of exactly 0, even in half precision


def balanced(counts: Sequence[int]) -> Tensor:
    """Return class weights w_c = N / (K · n_c), where N = Σ n_c, and K is the number of classes with n_c > 0.

    The mean of the class weights over all training cases is 1. A class with n_c = 0 has the class weight 1.

    Args:
        counts: n_c, the number of training cases of each class, or the number of pixels of each class in masks.
    """
    known = torch.tensor(counts, dtype=torch.float64)
    here = known > 0
    weights = torch.ones(len(known), dtype=torch.float64)
    weights[here] = known.sum() / (here.sum() * known[here])
    return weights.float()


def weighted(loss: LossFunction, weights: Tensor, share: float) -> LossFunction:
    """Return a loss function that multiplies the cross entropy of each case or pixel by the weight of the case's or
    pixel's class.

    The returned loss is ℓ + share · mean((w_y − 1) · CE), where CE is the cross entropy of a case and w_y the weight of
    the case's class. If a network has one logit for two classes, the logit belongs to the second class, and the first
    class has the logit 0.

    Args:
        share: the factor of the cross entropy in ℓ
    """

    def extra(output: Tensor, target: Tensor, classes: list[int] | None) -> Tensor:
        if output.shape[1] == 1:
            output = torch.cat([torch.zeros_like(output), output], 1)
        entropies = cross_entropy(output, target, reduction="none")
        own = weights if classes is None else weights[classes]
        there = own.to(output.device, non_blocking=True)
        return ((there[labels_in(target)] - 1) * entropies).mean()

    def weighted_loss(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) + share * marginal(extra, output, target)

    return weighted_loss


def balanced_softmax(loss: LossFunction, counts: Sequence[int]) -> LossFunction:
    """Return the loss function ℓ(z + log n, y), where z are the network's logits (Ren et al. 2020).

    Training adds log n to the logits z; the logits z alone are right for data in which all classes are equally
    frequent. In training, a class with n_c = 0 gets the probability 0. If a network has one logit for two classes, the
    logit belongs to the second class, and the first class has the logit 0.

    Args:
        loss: the loss function ℓ
        counts: n_c, the number of training cases of each class
    """
    frequent = torch.tensor(counts, dtype=torch.float64)
    shift = torch.where(frequent > 0, frequent.log(), NEVER)

    def balanced_loss(output: Tensor, target: Tensor) -> Tensor:
        known = shift if output.shape[1] > 1 else shift[1:] - shift[0]
        return loss(output + known.to(output, non_blocking=True), target)

    return balanced_loss
