"""Copy tensors into reused memory, because the operating system needs time to fill new memory with zeros."""

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LEAST = 1 << 18  # minimum bytes of a memory block that is kept for reuse; the C library itself reuses smaller blocks
MOST_SPARE = 256 << 20  # limit on the total bytes of the released blocks that are kept for reuse

_spare: dict[int, list[np.ndarray]] = {}  # released memory blocks by size in bytes


def copied(tensor: Tensor) -> Tensor:
    """Return a detached, contiguous copy of a tensor in CPU memory."""
    own = tensor.detach()
    if own.nbytes < LEAST:
        return own.to("cpu", copy=True, memory_format=torch.contiguous_format)
    copy = empty(own.shape, own.dtype)
    # numpy copies the tensor, because PyTorch would use several threads, which use the processor even while they wait
    if own.is_contiguous() and own.device.type == "cpu":
        copy.view(-1).view(torch.uint8).numpy()[:] = own.view(-1).view(torch.uint8).numpy()
        return copy
    return copy.copy_(own)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor, which occupies a released memory block if possible."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return torch.empty(shape, dtype=dtype)
    block = _block_of(size)
    lent = block.view()
    weakref.finalize(lent, _take_back, block).atexit = False
    return torch.from_numpy(lent).view(dtype).view(shape)


def _block_of(size: int) -> np.ndarray:
    try:
        return _spare[size].pop()
    except (KeyError, IndexError):
        return np.empty(size, np.uint8)


def _take_back(block: np.ndarray) -> None:
    """Keep a released memory block for reuse; any thread may call this function at any time."""
    waiting = sum(size * len(blocks) for size, blocks in list(_spare.items()))
    if waiting + block.nbytes <= MOST_SPARE:
        _spare.setdefault(block.nbytes, []).append(block)
