"""Low-rank adapters beside linear layers and convolutions: Hu et al., LoRA, 2022.

y = W x + b + (α / r) · B (A x), where A reads as W does and has r outputs, and B is linear. B begins as zero, so an
adapted layer begins with the layer's own output.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.extend import MedsiloError, Section

SHARED, OWN = "adapter", "own_adapter"  # names of a layer's adapters; a hospital's own acts beside the shared one


class Adapters(Section):
    """The numbers of the adapters."""

    rank: int = Field(8, ge=1, le=1024, description="r, the outputs of A")
    alpha: float = Field(16.0, gt=0, le=1e4, description="α: an adapter's output is multiplied by α / r")
    of: Annotated[tuple[str, ...], Field(min_length=1, max_length=100)] = Field(
        ("*",),
        description="the linear layers and convolutions that get one, by patterns of their names in the network; the "
        "head, its last layer, never does",
    )


class Adapter(nn.Sequential):
    """B and A of one layer, and α / r."""

    def __init__(self, layer: nn.Module, numbers: Adapters) -> None:
        if isinstance(layer, nn.Linear):
            down: nn.Module = nn.Linear(layer.in_features, numbers.rank, bias=False)
            up: nn.Module = nn.Linear(numbers.rank, layer.out_features, bias=False)
        else:
            kind, conv = cast(Any, type(layer)), cast(nn.Conv2d, layer)
            reads = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "padding_mode")}
            down = kind(conv.in_channels, numbers.rank, conv.kernel_size, bias=False, **reads)
            up = kind(numbers.rank, conv.out_channels, 1, bias=False)
        nn.init.zeros_(cast(Tensor, up.weight))
        super().__init__(down, up)
        self.to(cast(Tensor, layer.weight).dtype)
        self.numbers, self.scale = numbers, numbers.alpha / numbers.rank

    def change(self) -> Tensor:
        """Return (α / r) · B A in the form of the layer's weight, in float64."""
        down, up = (cast(Tensor, layer.weight).detach().double() for layer in self)
        return self.scale * (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])


ADAPTABLE: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _with_adapters(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return a layer's output with what its adapters add."""
    for adapter in adapters_of(layer):
        output = output + adapter.scale * adapter(*inputs)
    return output


def adapters_of(layer: nn.Module) -> list[Adapter]:
    """Return a layer's adapters."""
    return [own for name in (SHARED, OWN) if (own := layer._modules.get(name)) is not None]  # type: ignore[misc]


def adapt(network: nn.Module, numbers: Adapters, head: Sequence[nn.Module]) -> list[str]:
    """Give layers their adapters; returns the names of the parameters that came with them."""
    layers = {
        name: layer
        for name, layer in network.named_modules()
        if type(layer) in ADAPTABLE and getattr(layer, "groups", 1) == 1 and layer not in head
    }
    for pattern in numbers.of:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise MedsiloError(
                f"network.adapters.of: {pattern!r} is no linear layer or convolution of this network but its head; it "
                f"has, for example, {', '.join(list(layers)[:3]) or 'none'}"
            )
    chosen = {name: layer for name, layer in layers.items() if any(fnmatchcase(name, own) for own in numbers.of)}
    for layer in chosen.values():
        layer.add_module(SHARED, Adapter(layer, numbers))
        layer.register_forward_hook(_with_adapters)  # so that it is still of its own kind, under its own name
    return [f"{name}.{SHARED}.{place}.weight" for name in chosen for place in range(2)]


def add_own(network: nn.Module) -> None:
    """Give each layer that has an adapter another one, of the same numbers."""
    for layer in [layer for layer in network.modules() if adapters_of(layer)]:
        layer.add_module(OWN, Adapter(layer, adapters_of(layer)[0].numbers))


@torch.no_grad()
def merged_weight(layer: nn.Module) -> Tensor | None:
    """Return the weight that does what a layer does with its adapters; None where it has none."""
    adapters = adapters_of(layer)
    if not adapters:
        return None
    weight = cast(Tensor, layer.weight)
    return sum((own.change() for own in adapters), start=weight.double()).to(weight.dtype)
