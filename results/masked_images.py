"""Training without labels: a network learns to fill in what was hidden of an image, and becomes a backbone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.learning import layers, steps
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.phase import Group
from medsilo.schedule.train_context import TrainContext

THUMBNAIL = 8  # values along each side of the picture that one vector of features has to give


class MaskedImages(Algorithm):
    """min ‖m ∘ (d(f((1 − m) ∘ x)) − x)‖² / ‖m‖₁: f is the network before its head, d one layer, m hides random blocks.

    A network that segments fills in the hidden values. One that classifies has one vector of features for an image, of
    which d makes a small picture of the whole.
    """

    title = "Masked images"
    paper = "the idea of Xie et al. 2022 (SimMIM)"

    name: Literal["masked-images"] = "masked-images"
    block: int = Field(8, ge=1, le=256, description="length of a hidden block's sides")
    share: float = Field(0.5, gt=0, lt=1, description="chance of each block to be hidden")

    def networks(self, build: Any) -> dict[str, nn.Module]:
        model = build()
        if not (head := layers.head_layers(model)):
            raise MedsiloError(
                "algorithm.name: masked-images needs a network whose last layer is linear or a convolution"
            )
        return {"model": model, "decoder": decoder_of(head[0], build.channels, build.shape)}

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        yield from super().conflicts(plan, dict(networks))
        if plan.model_selection.keep != "last":
            yield f"model_selection.keep: {self.name} trains no head, so that scores choose nothing; set last"

    def warnings(self, sites: Sequence[str]) -> list[str]:
        return ["scores are those of a head that does not train: they say nothing of the backbone"]

    def groups(self) -> tuple[Group, ...]:
        model = Group("model", lambda modules: modules["model"].state_dict())
        return model, Group("decoder", lambda modules: modules["decoder"].state_dict())

    def work(self, bench: TrainContext) -> float:
        """Train both networks, by images alone."""
        decoder, other = bench.modules["decoder"], bench.optimizers["decoder"]

        def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            hidden = blocks(inputs, self.block, self.share)
            _, features = steps.with_given(model, inputs * (1 - hidden))
            return missed(decoder(features), inputs, hidden)

        def step(optimizer: Optimizer, closure: Callable[[], Tensor]) -> Tensor:
            other.zero_grad()
            loss = closure()
            optimizer.step()
            other.step()
            return loss

        return bench.train(bench.lesson("model", objective, step))


def decoder_of(head: nn.Module, channels: int, shape: Sequence[int] | None) -> nn.Module:
    """Return d: of features to an image, or to a small picture of it."""
    if not isinstance(head, nn.Linear):
        return cast(Any, type(head))(head.in_channels, channels, 1)
    if shape is None:
        raise MedsiloError("algorithm.name: masked-images needs images of one size; set task.size")
    small = [min(THUMBNAIL, side) for side in shape[1:]]
    return nn.Sequential(
        nn.Linear(head.in_features, channels * torch.Size(small).numel()), nn.Unflatten(1, (channels, *small))
    )


def blocks(inputs: Tensor, side: int, share: float) -> Tensor:
    """Return 1 where values are hidden, [B, 1, *grid]: in whole blocks, each case's its own."""
    grid = inputs.shape[2:]
    coarse = torch.rand(len(inputs), 1, *(-(-length // side) for length in grid)) < share
    fine = coarse.to(inputs)
    for axis in range(2, inputs.dim()):
        fine = fine.repeat_interleave(side, axis).narrow(axis, 0, grid[axis - 2])
    return fine


def missed(output: Tensor, inputs: Tensor, hidden: Tensor) -> Tensor:
    """Return the mean squared error of hidden values, or of the small picture where the output is one."""
    if output.shape == inputs.shape:
        square: Tensor = (hidden * (output - inputs).square()).sum() / (hidden.sum() * inputs.shape[1]).clamp(min=1)
        return square
    pool = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d)
    small: Tensor = cast(Any, pool[inputs.dim() - 3])(inputs, output.shape[2:])
    return (output - small).square().mean()
