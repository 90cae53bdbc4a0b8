"""Derive the seed of every random generator from the plan's seed and a purpose.

A purpose is a sequence of words and integers, such as ("hospital-a", "shuffle", 3). Because seeds are derived,
checkpoints need not contain the state of random generators. Because seeds are derived, trained weights do not depend on
the order, process or thread in which sites train.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """Derive a seed in [0, 2**63) for one purpose. The derived seed is the same on every machine.

    >>> seed_for(7, "st-anna", "shuffle") == seed_for(7, "north", "shuffle")
    False

    Args:
        seed: the seed from which the new seed is derived
        purpose: words and numbers that name the purpose
    """
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> "torch.Generator":
    """Return a random generator on the CPU for one purpose.

    Args:
        seed, purpose: as for `seed_for`
    """
    import torch  # the import is within the function, because commands that do not train import this module, too

    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def seed_torch(seed: int, device: "torch.device | None" = None) -> None:
    import torch

    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
