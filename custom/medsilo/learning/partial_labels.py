"""Labels that a hospital did not draw or look for: a mark on those of its cases, and the loss that reads it.

A label is one byte; above it stands one bit for each label that nobody drew in this case. There "background" means that
label as well, so both are one in the loss: exactly what a network knows of background together (a marginal likelihood).
A place that shows a drawn structure shows none of the others, so there the loss also learns what is not there.

A case of a classification has one class, and no class stands for the rest. What is labelled k is k. A class that nobody
looked for has no cases here, so nothing is learned of it: chances are those among the other classes. Where its cases
have another's label, that label means one of several, and the chance of the label is the sum of theirs.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from medsilo.learning.compute import BYTE, is_marked, labels_in, marks_in

MOST = 15  # labels with a bit: MONAI moves labels as float32, which holds 24 bits exactly
ALIKE = BYTE + MOST + 1  # where the bits of classes stand that a case may have instead of its label's


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


# -------------------------------------------------------------------------------------------- classes of whole cases
def marks_of_classes(classes: int, absent: Collection[int], alike: Collection[Collection[int]]) -> list[int]:
    """Return what is added to each class at a hospital, 0 where it tells all apart.

    absent: classes without cases there. alike: classes that one of its labels stands for, the first being written.
    """
    may = {label: set(own) - {label} for own in alike for label in own}
    if not absent and not may:
        return [0] * classes
    always = mark_of([*absent, MOST])  # a bit of no class says that not all are told apart
    return [always | mark_of(may.get(label, ())) << ALIKE - BYTE for label in range(classes)]


def among_present(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return marked cases' scores of classes, -inf where the hospital has none, and which classes each case may have.

    Both are [cases, classes].
    """
    numbers = torch.arange(scores.shape[1], device=target.device)
    absent, alike = ((target[:, None] >> first + numbers & 1).bool() for first in (BYTE, ALIKE))
    return scores.masked_fill(absent, -torch.inf), alike | (labels_in(target)[:, None] == numbers)


def class_entropies(scores: Tensor, target: Tensor) -> Tensor:
    """Return -log(Σ p_i of the classes that a case may have / Σ p_i of those that its hospital has), [cases]."""
    if not is_marked(target):
        return functional.cross_entropy(scores, target, reduction="none")
    known, may = among_present(scores, target)
    return known.logsumexp(1) - known.masked_fill(~may, -torch.inf).logsumexp(1)
