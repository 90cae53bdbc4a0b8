"""Derive the seed of every random generator from the plan's seed and a purpose.

A purpose is a list of words and numbers, such as ("hospital-a", "shuffle", 3). With derived seeds, checkpoints need no
state of generators, and sites may train in any order, process or thread.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**63) for this purpose, which is the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> "torch.Generator":
    """Return a CPU generator, seeded for this purpose."""
    import torch  # here, because commands that do not train also import this module

    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def seed_torch(seed: int, device: "torch.device | None" = None) -> None:
    """Seed torch's generators on the CPU and on this GPU, but on no other GPU.

    `torch.manual_seed` is slower: it records a stack trace for each type of device that is missing.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
