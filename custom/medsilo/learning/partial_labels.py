"""Train on masks in which a hospital did not annotate all structures.

The lowest byte of a label is the class, and each higher bit marks a structure that was not annotated in the case. A
pixel labelled as background may belong to a structure without annotations. The loss at a background pixel uses the
total probability of background and of all structures without annotations (a marginal likelihood). A pixel of an
annotated structure belongs only to this structure, so the loss at the pixel reduces the probabilities of all other
structures.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from medsilo.learning.compute import BYTE, labels_in, marks_in

# Largest label that can be marked as not annotated. MONAI converts labels and marks to float32, which represents only
# 24 bits exactly.
MOST = 15


def mark_of(absent: Collection[int]) -> int:
    """Return a number that marks the structures with the given labels as not annotated; each bit of the number stands
    for one label.

    >>> mark_of([2]) >> 8
    4
    """
    return sum(1 << label for label in set(absent)) << BYTE


def marked(labels: Tensor, mark: int) -> Tensor:
    """To the labels of a case, add the bits that mark structures without annotations. If the case lacks annotations of
    a structure, the label -1 of empty areas is replaced by the label of background.

    Args:
        labels: the labels of a case
        mark: a number whose bits mark structures; with 0, the labels stay unchanged
    """
    return labels.long().clamp(min=0) | mark if mark else labels


def absent_in(mark: int) -> list[int]:
    """Return the labels of the structures that are not annotated; each bit of `mark` stands for one label."""
    return [label for label in range(MOST + 1) if mark >> BYTE >> label & 1]


def known_in(target: Tensor, labels: int) -> Tensor:
    """Return a Boolean tensor [cases, labels] that is true for each label which was annotated in a case."""
    known = torch.ones(len(target), labels, dtype=torch.bool)
    for case, mark in enumerate(marks_in(target)):
        known[case, absent_in(mark)] = False
    return known


def places_on(device: torch.device, indices: Sequence[int]) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True)


def told_apart(
    outputs: Sequence[Tensor], target: Tensor, overlaps: bool = False
) -> Iterator[tuple[list[Tensor], Tensor, list[int]]]:
    """Divide the cases into sets in which all cases have the same annotated labels, and yield the outputs and targets
    of each set.

    At each resolution, the outputs have the shape [cases, labels, ...]. The targets are indices into the yielded list
    of annotated labels.

    The logit of background becomes z_0' = log(e^{z_0} + Σ e^{z_u}) over the labels u that are not annotated. The
    softmax of z_0' gives background p_0' = p_0 + Σ p_u, and leaves the probabilities of annotated structures unchanged.

    Args:
        overlaps: whether structures may overlap; then each output belongs to one structure, a mark numbers the
            structures 1, 2, ..., and the outputs of structures without annotations are omitted
    """
    marks, at = marks_in(target), partial(places_on, target.device)
    for mark in sorted(set(marks)):
        absent = [label - overlaps for label in absent_in(mark)]
        here = [case for case, own in enumerate(marks) if own == mark]
        whole = len(here) == len(marks)
        mine, labels = (
            [output if whole else output[at(here)] for output in outputs],
            target if whole else target[at(here)],
        )
        kept = [label for label in range(outputs[0].shape[1]) if label not in absent]
        if mark and overlaps:
            mine, labels = [one[:, at(kept)] for one in mine], labels_in(labels)
        elif mark:
            backgrounds = [one[:, at([0, *absent])].logsumexp(1, keepdim=True) for one in mine]
            mine = [
                torch.cat([background, one[:, at(kept[1:])]], 1)
                for background, one in zip(backgrounds, mine, strict=True)
            ]
            labels = labels_in(labels)
            places = torch.zeros(256, dtype=labels.dtype, device=labels.device)
            places[at(kept)] = torch.arange(len(kept), dtype=labels.dtype, device=labels.device)
            labels = places[labels]
        yield mine, labels, kept


def marginal(
    loss: Callable[..., Tensor], output: Tensor | list[Tensor], target: Tensor, overlaps: bool = False
) -> Tensor:
    """Return the mean loss over cases, where the loss of a case uses only the labels that the case's hospital
    annotated.
    """
    if not any(marks_in(target)):
        return loss(output, target, None)
    alone = isinstance(output, Tensor)
    parts = told_apart([output] if isinstance(output, Tensor) else output, target, overlaps)
    each = [len(labels) * loss(mine[0] if alone else mine, labels, kept) for mine, labels, kept in parts]
    return torch.stack(each).sum() / len(target)
