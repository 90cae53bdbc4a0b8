"""Define types for collections of tensors, and functions that hash, round and check tensors."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from medsilo.core.mmap_store import bytes_of

Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]  # groups of tensors that sites and the server exchange, by name
Modules = dict[str, nn.Module]  # a site's networks, by name


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Return one SHA-256 over the names, types, shapes and values of tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        found.update(bytes_of(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


def precision_of(module: nn.Module) -> torch.dtype:
    """Return the type of a network's first floating-point tensor; without such a tensor, return PyTorch's default
    type.
    """
    tensors = module.state_dict().values()
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())


def packed(tensor: Tensor, precision: str) -> Tensor:
    """Return a tensor in the number type in which a site or the server sends the tensor.

    A float32 tensor is converted to bfloat16 if the plan's transport.precision is bfloat16. A tensor of any type except
    float32 keeps its type.

    >>> packed(torch.zeros(2), "bfloat16").dtype, packed(torch.zeros(2).double(), "bfloat16").dtype
    (torch.bfloat16, torch.float64)
    """
    return tensor.bfloat16() if precision == "bfloat16" and tensor.dtype == torch.float32 else tensor


def is_finite(tensor: Tensor) -> bool:
    """True if all values of a tensor are finite; the check looks only at the smallest and the largest value."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
