"""Derive the seed of every random generator from the plan's seed and a purpose.

A purpose is a sequence of words and numbers, such as ("hospital-a", "shuffle", 3). Because seeds are derived,
checkpoints need not contain the state of generators. Results do not depend on the order, the process or the thread in
which sites train.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**63) for a purpose. The seed is the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> "torch.Generator":
    """Return a CPU generator that is seeded for a purpose."""
    import torch  # not at the top, because commands that do not train also import this module

    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def seed_torch(seed: int, device: "torch.device | None" = None) -> None:
    """Seed PyTorch's default generator on the CPU and, if `device` is a GPU, the generator of this GPU.

    `torch.manual_seed` would be slower, because it records a stack trace for each type of device that is missing.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
