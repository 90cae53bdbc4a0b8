"""MOON's contrast between the features that networks make of the same inputs, and its projection of them."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from medsilo.learning.layers import head_layers

POINTWISE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}  # by axes


def with_projection(model: nn.Module, width: int) -> nn.Module:
    """Put MOON's projection into a network: two layers, from the features over as many to so many, and a new head.

    Behind a convolution each place of an image is projected by itself. A network without a head stays as it is.
    """
    for head in head_layers(model):
        projected = _projected(head, width)
        name = next(name for name, layer in model.named_modules() if layer is head)
        if not name:
            return projected
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, projected)
    return model


def _projected(head: nn.Module, width: int) -> nn.Sequential:
    if isinstance(head, nn.Linear):
        features = head.in_features
        layers = nn.Linear(features, features), nn.Linear(features, width)
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.Linear(width, head.out_features))
    assert isinstance(head, _ConvNd)
    features, point = head.in_channels, POINTWISE[len(head.kernel_size)]
    form = {key: getattr(head, key) for key in ("kernel_size", "stride", "padding", "dilation")}
    if isinstance(head, _ConvTransposeNd):
        form["output_padding"] = head.output_padding
    new = type(head)(width, head.out_channels, **form)
    return nn.Sequential(point(features, features, 1), nn.ReLU(), point(features, width, 1), new)


def with_features(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the network's output, and what its head was given, one row per case: [B, features]."""
    given: list[Tensor] = []
    (head,) = head_layers(model)
    hook = head.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].flatten(1)))
    try:
        output = model(inputs)
    finally:
        hook.remove()
    return output, given[-1]


@torch.no_grad()
def frozen_features(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the features of a network that doesn't learn, in evaluation."""
    return with_features(model.eval(), inputs)[1]


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """Return -log(e^{cos(z, near) / τ} / (e^{cos(z, near) / τ} + e^{cos(z, far) / τ})), the mean over cases.

    In the features' own type, but for half precision, which is too coarse for a cosine.
    """
    kind = torch.promote_types(z.dtype, torch.float32)
    closer, further = (functional.cosine_similarity(z.to(kind), other.to(kind)) for other in (near, far))
    return functional.softplus((further - closer) / temperature).mean()
