"""Structures that a hospital did not draw: a mark on the labels of its cases, and the loss that reads it.

A label is one byte; above it stands one bit for each label that nobody drew in this case. There "background" means that
label as well, so both are one in the loss: exactly what a network knows of background together (a marginal likelihood).
A place that shows a drawn structure shows none of the others, so there the loss also learns what is not there.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from medsilo.learning.compute import BYTE, labels_in, marks_in

MOST = 15  # labels with a bit: MONAI moves labels as float32, which holds 24 bits exactly


def mark_of(absent: Collection[int]) -> int:
    """Return what is added to the labels of a case in which these labels were not drawn.

    >>> mark_of([2]) >> 8
    4
    """
    return sum(1 << label for label in set(absent)) << BYTE


def marked(labels: Tensor, mark: int) -> Tensor:
    """Return the labels of a case with its mark; -1, where an image was empty, is background then."""
    return labels.long().clamp(min=0) | mark if mark else labels


def absent_in(mark: int) -> list[int]:
    """Return the labels of a mark."""
    return [label for label in range(MOST + 1) if mark >> BYTE >> label & 1]


def known_in(target: Tensor, labels: int) -> Tensor:
    """Return which labels were drawn in each case, [cases, labels]."""
    known = torch.ones(len(target), labels, dtype=torch.bool)
    for case, mark in enumerate(marks_in(target)):
        known[case, absent_in(mark)] = False
    return known


def places_on(device: torch.device, places: Sequence[int]) -> Tensor:
    """Return an index that lies on a device, without waiting for it."""
    return torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)


def told_apart(
    outputs: Sequence[Tensor], target: Tensor, overlaps: bool = False
) -> Iterator[tuple[list[Tensor], Tensor, list[int]]]:
    """Yield cases of like marks: outputs [cases, labels, ...] of those that their hospital tells apart, in order, at
    each resolution; labels by their places among these; and what they are.

    z_0' = log(e^{z_0} + Σ e^{z_u}) over the undrawn u, so that softmax gives p_0' = p_0 + Σ p_u, and leaves the others.
    overlaps: outputs are of structures, each found by itself, which a mark has as 1, 2, ...: the others are left out.
    """
    marks, at = marks_in(target), partial(places_on, target.device)
    for mark in sorted(set(marks)):
        absent = [label - overlaps for label in absent_in(mark)]
        here = [case for case, own in enumerate(marks) if own == mark]
        whole = len(here) == len(marks)
        mine, labels = [one if whole else one[at(here)] for one in outputs], target if whole else target[at(here)]
        kept = [label for label in range(outputs[0].shape[1]) if label not in absent]
        if mark and overlaps:
            mine, labels = [one[:, at(kept)] for one in mine], labels_in(labels)
        elif mark:
            backgrounds = [one[:, at([0, *absent])].logsumexp(1, keepdim=True) for one in mine]
            mine = [torch.cat([own, one[:, at(kept[1:])]], 1) for own, one in zip(backgrounds, mine, strict=True)]
            labels = labels_in(labels)
            places = torch.zeros(256, dtype=labels.dtype, device=labels.device)
            places[at(kept)] = torch.arange(len(kept), dtype=labels.dtype, device=labels.device)
            labels = places[labels]
        yield mine, labels, kept


def marginal(
    loss: Callable[..., Tensor], output: Tensor | list[Tensor], target: Tensor, overlaps: bool = False
) -> Tensor:
    """Return the mean over cases of a loss, each of the labels that its hospital tells apart; None: of all."""
    if not any(marks_in(target)):
        return loss(output, target, None)
    alone = isinstance(output, Tensor)
    parts = told_apart([output] if isinstance(output, Tensor) else output, target, overlaps)
    each = [len(labels) * loss(mine[0] if alone else mine, labels, kept) for mine, labels, kept in parts]
    return torch.stack(each).sum() / len(target)
