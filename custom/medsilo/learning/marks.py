"""Marks of labels that a hospital did not draw: one bit for each, above the label. partial_labels.py learns by them."""

import torch
from torch import Tensor

KNOWN = "known_marks"  # of labels on a card
BYTE = 8


def marks_in(target: Tensor) -> list[int]:
    """Return the mark of each case, [cases, ...]: the same at all of its places but those that were filled up."""
    return getattr(target, KNOWN, None) or _read_marks(target)


def _read_marks(target: Tensor) -> list[int]:
    if target.is_floating_point() or target.dtype == torch.uint8 or not target.numel() or int(target.max()) <= 255:
        return [0] * len(target)
    return (target.view(len(target), -1).amax(1) >> BYTE << BYTE).tolist()


def know_marks(target: Tensor, read_from: Tensor) -> Tensor:
    """Return these labels, which know their marks from the same ones in memory: else each loss waits for the card."""
    if target.device.type != "cpu":
        setattr(target, KNOWN, marks_in(read_from))
    return target


def part_of(target: Tensor, cases: slice) -> Tensor:
    """Return the labels of some cases, which know their marks if the others did."""
    part, known = target[cases], getattr(target, KNOWN, None)
    if known:
        setattr(part, KNOWN, known[cases])
    return part
