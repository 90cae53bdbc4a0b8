"""Losses in which a rare class counts as much as a frequent one."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medsilo.learning.compute import LossFunction, labels_in
from medsilo.learning.partial_labels import marginal

NEVER = -1e4  # added to a logit, it makes the softmax probability exactly 0, also in half precision


def balanced(counts: Sequence[int]) -> Tensor:
    """Return class weights w_c = N / (K · n_c), where K is the number of classes that occur; their mean over cases is
    1.

    counts: n_c, the number of training cases of each class, or of pixels in masks. A class that does not occur has
        weight 1.
    """
    known = torch.tensor(counts, dtype=torch.float64)
    here = known > 0
    weights = torch.ones(len(known), dtype=torch.float64)
    weights[here] = known.sum() / (here.sum() * known[here])
    return weights.float()


def weighted(loss: LossFunction, weights: Tensor, share: float) -> LossFunction:
    """Return the loss with the cross entropy of each case or pixel multiplied by the weight of its class.

    The result is ℓ + share · mean((w_y − 1) · CE). Because the loss is a mean over cases, a case has the same weight
    alone as in a batch. Of two classes with one logit, the logit belongs to the second class, and the first has logit
    0.

    share: the factor of the cross entropy within the loss.
    """

    def extra(output: Tensor, target: Tensor, kept: list[int] | None) -> Tensor:
        if output.shape[1] == 1:
            output = torch.cat([torch.zeros_like(output), output], 1)
        entropies = cross_entropy(output, target, reduction="none")
        own = weights if kept is None else weights[kept]
        there = own.to(output.device, non_blocking=True)
        return ((there[labels_in(target)] - 1) * entropies).mean()

    def weighted_loss(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) + share * marginal(extra, output, target)

    return weighted_loss


def balanced_softmax(loss: LossFunction, counts: Sequence[int]) -> LossFunction:
    """Return the loss ℓ(z + log n, y), which trains logits z for data in which all classes are equally frequent.

    counts: n_c, the number of training cases of each class (Ren et al. 2020). A class that does not occur has
        probability 0. Of two classes with one logit, the logit belongs to the second class, and the first has logit 0.
    """
    frequent = torch.tensor(counts, dtype=torch.float64)
    shift = torch.where(frequent > 0, frequent.log(), NEVER)

    def balanced_loss(output: Tensor, target: Tensor) -> Tensor:
        known = shift if output.shape[1] > 1 else shift[1:] - shift[0]
        return loss(output + known.to(output, non_blocking=True), target)

    return balanced_loss
