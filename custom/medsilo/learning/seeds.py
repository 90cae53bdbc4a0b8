"""Random numbers that depend on what they are for and on nothing else.

Every use derives its own seed from the plan's seed and words that name the use ("hospital-a", "shuffle", round 3).
So a run needs no generator state in its checkpoints, and sites may train in any order, process or thread.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2**63) for this purpose; the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> "torch.Generator":
    """A CPU generator for this purpose."""
    import torch  # seeds alone are for commands that train nothing, too

    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def seed_torch(seed: int, device: "torch.device | None" = None) -> None:
    """Seed what torch draws from on the CPU, and on this card; no other card is touched.

    `torch.manual_seed` takes a stack trace for each kind of device that is not there.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
