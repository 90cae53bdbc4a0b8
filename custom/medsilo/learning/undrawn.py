"""Structures that a hospital did not draw: a mark that travels with a case's labels, and the loss that reads it.

A label is one byte; above it stands one bit for each label that nobody drew in this case. There "background" means that
label as well, so both are one in the loss: exactly what a network knows of background together (a marginal likelihood).
A place that shows a drawn structure shows none of the others, so there the loss also learns what is not there.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

BYTE = 8
MOST = 15  # labels with a bit: MONAI moves labels as float32, which holds 24 bits exactly


def mark_of(absent: Collection[int]) -> int:
    """Return what is added to the labels of a case in which these labels were not drawn.

    >>> mark_of([2]) >> 8
    4
    """
    return sum(1 << label for label in set(absent)) << BYTE


def labels_in(target: Tensor) -> Tensor:
    """Return labels without marks."""
    return target & 255 if not target.is_floating_point() and target.dtype != torch.uint8 else target


def marks_in(target: Tensor) -> list[int]:
    """Return the mark of each case, [cases, ...]: the same at all of its places but those that were filled up."""
    if target.is_floating_point() or target.dtype == torch.uint8 or not target.numel() or int(target.max()) <= 255:
        return [0] * len(target)
    return (target.flatten(1).amax(1) >> BYTE << BYTE).tolist()


def absent_in(mark: int) -> list[int]:
    """Return the labels of a mark."""
    return [label for label in range(MOST + 1) if mark >> BYTE >> label & 1]


def known_in(target: Tensor, labels: int) -> Tensor:
    """Return which labels were drawn in each case, [cases, labels]."""
    known = torch.ones(len(target), labels, dtype=torch.bool)
    for case, mark in enumerate(marks_in(target)):
        known[case, absent_in(mark)] = False
    return known


def told_apart(output: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Yield cases of like marks: outputs [cases, labels, ...] of those that their hospital tells apart, in order,
    labels by their places among these, and what they are.

    z_0' = log(e^{z_0} + Σ e^{z_u}) over the undrawn u, so that softmax gives p_0' = p_0 + Σ p_u, and leaves the others.
    """
    marks = marks_in(target)
    for mark in sorted(set(marks)):
        absent = absent_in(mark)
        here = [case for case, own in enumerate(marks) if own == mark]
        mine, labels = (output, target) if len(here) == len(marks) else (output[here], target[here])
        kept = [label for label in range(output.shape[1]) if label not in absent]
        if mark:
            background = mine[:, [0, *absent]].logsumexp(1, keepdim=True)
            mine, labels = torch.cat([background, mine[:, kept[1:]]], 1), labels_in(labels)
            places = torch.zeros(256, dtype=labels.dtype, device=labels.device)
            places[kept] = torch.arange(len(kept), dtype=labels.dtype, device=labels.device)
            labels = places[labels]
        yield mine, labels, kept


def marginal(loss: Callable[[Tensor, Tensor, list[int] | None], Tensor], output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over cases of a loss, each of the labels that its hospital tells apart; None: of all."""
    if not any(marks_in(target)):
        return loss(output, target, None)
    each = [len(mine) * loss(mine, labels, kept) for mine, labels, kept in told_apart(output, target)]
    return torch.stack(each).sum() / len(output)
