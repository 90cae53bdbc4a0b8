"""Choose the largest size, network and batch that the machine's memory holds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medsilo.core.text import size_text
from medsilo.plan import Plan

ROOM = 0.5  # of the free memory: cases, the other programs and what can't be foreseen need some, too
DEEPEST = 5  # levels
SMALLEST = 4  # places along an axis at the deepest level


@dataclass(frozen=True)
class Machine:
    """The memory that is free for training, in bytes, and whether it is a GPU's."""

    free: int
    gpu: bool

    @property
    def words(self) -> str:
        """Say which memory that is."""
        return "on this GPU" if self.gpu else "on this machine, which trains on its CPU"


@dataclass(frozen=True)
class Step:
    """One step of a ladder from large to small: the most along each axis, the features of a U-Net, the batch."""

    caps: tuple[int, ...]
    batch: int
    features: tuple[int, ...] = ()
    network: str = "unet"

    def levels(self, sizes: Sequence[float]) -> tuple[int, ...]:
        """Return the features of as many levels as images of these sizes have room for; two at least."""
        shortest = min(min(size, cap) for size, cap in zip(sizes, self.caps, strict=True))
        count = int(math.log2(max(shortest, 1) / SMALLEST)) + 1 if shortest >= SMALLEST else 0
        return self.features[: min(DEEPEST, max(2, count))]

    def multiple(self, sizes: Sequence[float]) -> int:
        """Return the number of which sizes have to be multiples."""
        if self.features:
            return 2 ** (len(self.levels(sizes)) - 1)
        return 32 if self.network == "densenet121" else 8


@dataclass(frozen=True)
class Fit:
    """The step that was chosen, what it needs in bytes, and what the next larger one would have needed."""

    step: Step
    needs: int = 0
    larger: int = 0  # 0: there is none
    free: int = 0

    @property
    def why(self) -> str:
        """The reason for this network."""
        return f"about {size_text(self.needs)} in training, where {size_text(self.free)} are free"

    def limit(self, machine: Machine) -> str:
        """Return why size and batch are not larger."""
        if self.larger:
            return f"the next larger step would need about {size_text(self.larger)} {machine.words}"
        return "the largest that is tried" + ("" if machine.gpu else ", so that a round takes minutes on a CPU")


WIDE, SLIM = (32, 64, 128, 256, 320), (16, 32, 64, 128, 256)


def steps_for(segments: bool, dimensions: int, machine: Machine) -> list[Step]:
    """Return the steps to try, the largest first. Without a GPU they begin lower, so that a round takes minutes."""
    if segments and dimensions == 3:
        large = [Step((128, 128, 64), 2, WIDE), Step((96, 96, 64), 2, WIDE), Step((96, 96, 64), 2, SLIM)]
        small = [Step((64, 64, 32), 2, SLIM), Step((48, 48, 32), 2, SLIM[:4]), Step((32, 32, 16), 2, SLIM[:3])]
    elif segments:
        large = [Step((512, 512), 8, WIDE), Step((512, 512), 4, WIDE), Step((256, 256), 8, WIDE)]
        small = [
            Step((256, 256), 8, SLIM),
            Step((128, 128), 8, SLIM),
            Step((128, 128), 4, SLIM[:4]),
            Step((64, 64), 4, SLIM[:3]),
        ]
    elif dimensions == 3:
        large = [Step((96, 96, 96), 4, network="densenet121"), Step((64, 64, 64), 4, network="densenet121")]
        small = [Step((64, 64, 64), 4, network="small-cnn"), Step((32, 32, 32), 4, network="small-cnn")]
    else:
        large = [Step((224, 224), 32, network="densenet121"), Step((224, 224), 16, network="densenet121")]
        small = [Step((128, 128), 16, network="small-cnn"), Step((64, 64), 8, network="small-cnn")]
    return [*large, *small] if machine.gpu else small


def largest_that_fits(steps: Sequence[Step], plan_for: Callable[[Step], Plan], machine: Machine) -> Fit:
    """Return the first step that has room, or the last."""
    larger = 0
    for step in steps[:-1]:
        needs = bytes_in_training(plan_for(step))
        if needs <= ROOM * machine.free:
            return Fit(step, needs, larger, machine.free)
        larger = needs
    return Fit(steps[-1], bytes_in_training(plan_for(steps[-1])), larger, machine.free)


def bytes_in_training(plan: Plan) -> int:
    """Return about how much a plan's network takes: weights, gradients, Adam's two numbers, and what layers keep.

    A batch goes through the network without values. What a layer gives out is there once more as a gradient.
    """
    model = plan.layout()["model"]
    kept = 0

    def count(_: nn.Module, __: object, output: object) -> None:
        nonlocal kept
        kept += output.nbytes if isinstance(output, Tensor) else 0

    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_hook(count)
    shape = plan.task.shape or ()
    with torch.no_grad():
        model.eval()(torch.zeros(plan.training.batch_size, *shape, device="meta"))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 4 * weights + 2 * kept
