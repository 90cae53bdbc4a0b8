"""Choose the network, its input size and the batch size for a GPU or a CPU. 'medsilo check' measures whether the
machine can train the chosen network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEEPEST = 5
SMALLEST = 4  # minimum number of voxels along each axis at the deepest level of a U-Net
WIDE, SLIM = (32, 64, 128, 256, 320), (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Fit:
    """A network that a machine can train in reasonable time, with three sizes: maximum input size, batch size, and
    features of a U-Net.
    """

    caps: tuple[int, ...]
    batch: int
    features: tuple[int, ...] = ()
    network: str = "unet"

    def levels(self, sizes: Sequence[float]) -> tuple[int, ...]:
        """Return the number of features of each level of a U-Net. A U-Net for larger images has more levels; every
        U-Net has at least two levels.
        """
        shortest = min(min(size, cap) for size, cap in zip(sizes, self.caps, strict=True))
        count = int(math.log2(max(shortest, 1) / SMALLEST)) + 1 if shortest >= SMALLEST else 0
        return self.features[: min(DEEPEST, max(2, count))]

    def multiple(self, sizes: Sequence[float]) -> int:
        """Return the number by which every side of an input must be divisible."""
        if self.features:
            return 2 ** (len(self.levels(sizes)) - 1)
        return 32 if self.network == "densenet121" else 8


def fit_for(segments: bool, dimensions: int, gpu: bool) -> Fit:
    """Choose a network and its sizes. On a GPU, training then needs 5 GB of memory; on a CPU, a round takes minutes."""
    if segments and dimensions == 3:
        return Fit((128, 128, 64), 2, WIDE) if gpu else Fit((64, 64, 32), 2, SLIM)
    if segments:
        return Fit((512, 512), 8, WIDE) if gpu else Fit((256, 256), 8, SLIM)
    if dimensions == 3:
        return Fit((96,) * 3, 4, network="densenet121") if gpu else Fit((64,) * 3, 4, network="small-cnn")
    return Fit((224, 224), 16, network="densenet121") if gpu else Fit((128, 128), 16, network="small-cnn")
