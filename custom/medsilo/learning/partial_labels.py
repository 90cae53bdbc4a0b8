"""Train on partially labelled masks: marks in the labels name the structures that a hospital did not annotate.

A label is one byte; each bit above the byte marks a structure without annotations in the case. Pixels labelled as
background may contain a structure without annotations, so the loss adds both probabilities (a marginal likelihood). A
pixel of an annotated structure belongs to no other structure, so the loss there also reduces the probabilities of all
other structures.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from medsilo.learning.compute import BYTE, labels_in, marks_in

MOST = 15  # greatest label with a bit, because MONAI converts labels to float32, which has 24 exact bits


def mark_of(absent: Collection[int]) -> int:
    """Return the mark of a case whose hospital did not annotate these structures.

    >>> mark_of([2]) >> 8
    4
    """
    return sum(1 << label for label in set(absent)) << BYTE


def marked(labels: Tensor, mark: int) -> Tensor:
    """Combine the labels of a case with its mark; if there is a mark, the label -1 of empty areas becomes
    background.
    """
    return labels.long().clamp(min=0) | mark if mark else labels


def absent_in(mark: int) -> list[int]:
    """Return the structures that a mark names as not annotated."""
    return [label for label in range(MOST + 1) if mark >> BYTE >> label & 1]


def known_in(target: Tensor, labels: int) -> Tensor:
    """Return a Boolean mask of the labels that were annotated in each case, [cases, labels]."""
    known = torch.ones(len(target), labels, dtype=torch.bool)
    for case, mark in enumerate(marks_in(target)):
        known[case, absent_in(mark)] = False
    return known


def places_on(device: torch.device, places: Sequence[int]) -> Tensor:
    """Copy indices to a device asynchronously."""
    return torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)


def told_apart(
    outputs: Sequence[Tensor], target: Tensor, overlaps: bool = False
) -> Iterator[tuple[list[Tensor], Tensor, list[int]]]:
    """Group cases by their annotated labels.

    Yields for each group the outputs [cases, labels, ...] of its annotated labels at each resolution, the targets as
    indices into these labels, and these labels.

    The logit of background becomes z_0' = log(e^{z_0} + Σ e^{z_u}) over the labels u that are not annotated. With this
    logit, softmax gives background p_0' = p_0 + Σ p_u, and does not change the other probabilities.

    Args:
        overlaps: whether structures may overlap, so that each output is a structure, numbered 1, 2, ... in a mark.
            Outputs of structures without annotations are left out
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
    """Return the mean loss over cases, where the loss of a case covers only the labels that its hospital annotated."""
    if not any(marks_in(target)):
        return loss(output, target, None)
    alone = isinstance(output, Tensor)
    parts = told_apart([output] if isinstance(output, Tensor) else output, target, overlaps)
    each = [len(labels) * loss(mine[0] if alone else mine, labels, kept) for mine, labels, kept in parts]
    return torch.stack(each).sum() / len(target)
