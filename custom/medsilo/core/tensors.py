"""Names for what holds tensors, and what tells one set of them from another."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from medsilo.core.mmap_store import bytes_of

Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]  # named groups of tensors, as they travel
Modules = dict[str, nn.Module]  # a site's networks, by name


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors, whatever file they lie in."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        found.update(bytes_of(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is a finite number: exactly when the least and the greatest are. One pass, no copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
