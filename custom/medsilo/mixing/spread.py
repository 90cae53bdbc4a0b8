"""Numbers that a server multiplies with: one for a whole group, one per tensor, or one per element."""

from collections.abc import Mapping

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError
from medsilo.mixing.layout import Block, Layout, Tensors

# One number, or by a tensor's name a number or a tensor of its shape. Tensors that are not averaged need none.
Numbers = float | Mapping[str, float | Tensor]


def spread(numbers: Numbers, layout: Layout, title: str) -> dict[str, Tensor]:
    """Return a number, or a tensor of its shape, for every tensor that is averaged.

    They must be finite and not negative; a MedsiloError names the first that is wrong.
    """
    given = numbers if isinstance(numbers, Mapping) else dict.fromkeys(layout.averaged, numbers)
    found: dict[str, Tensor] = {}
    for name in layout.averaged:
        if name not in given:
            raise MedsiloError(f"{title}: no number for {name}; give one for every tensor that is averaged")
        number, shape = given[name], layout.signature[name][0]
        value = number.contiguous() if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)
        if value.ndim and value.shape != shape:
            raise MedsiloError(
                f"{title}: {name} has shape {list(value.shape)}; give one number, or a tensor {list(shape)}"
            )
        if value.numel() and not (value.isfinite().all() and value.min() >= 0):
            raise MedsiloError(f"{title}: {name} has a number that is negative, infinite or NaN")
        found[name] = value
    return found


def numbers_of(block: Block, spread: Tensors) -> Tensor:
    """Return the numbers of a block, in double precision."""
    into = torch.empty(block.size, dtype=torch.float64)
    for piece, part in zip(block.pieces, into.split(block.sizes), strict=True):
        value = spread[piece.name]
        part.copy_(piece.of(spread) if value.ndim else value)
    return into
