"""MOON's contrast between the features that networks make of the same inputs."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.learning.layers import head_layers


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
