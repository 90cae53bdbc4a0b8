"""Find a network's normalisation layers and head by the types of its layers, and list the names of their tensors."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

HEAD_TYPES = (nn.Linear, _ConvNd)
NORM_TYPES: tuple[type[nn.Module], ...] = (_BatchNorm, nn.GroupNorm, _InstanceNorm, nn.LayerNorm)


def _names_within(module: nn.Module, layers: set[nn.Module]) -> list[str]:
    """Return the names of all parameters and buffers of the given layers, in the order of the state dict."""
    owned = {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if layer in layers
        for name in layer.state_dict()
    }
    return [name for name in module.state_dict() if name in owned]


def batch_norm_names(module: nn.Module) -> list[str]:
    return _names_within(module, set(batch_norm_layers(module)))


def norm_names(module: nn.Module) -> list[str]:
    """Return the state-dict names of all tensors of batch, group, instance and layer norms."""
    return _names_within(module, set(norm_layers(module)))


def norm_layers(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, NORM_TYPES)]


def local_norms(module: nn.Module) -> list[nn.Module]:
    return [*batch_norm_layers(module)] or norm_layers(module)


def local_norm_names(module: nn.Module) -> list[str]:
    """Return the state-dict names of those tensors that FedBN and AdaFed do not send."""
    return _names_within(module, set(local_norms(module)))


def batch_norm_buffer_names(module: nn.Module) -> list[str]:
    """Return the state-dict names of the running statistics and counters of all batch norms."""
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return [name for name in batch_norm_names(module) if name in buffers]


def head_names(module: nn.Module) -> list[str]:
    """Return the state-dict names of the head: the linear or convolution layer that the network registers last."""
    return _names_within(module, set(head_layers(module)))


def batch_norm_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def is_frozen(layer: _BatchNorm) -> bool:
    """Return True if the running statistics of a batch norm are fixed, which is the case if the batch norm's state dict
    is empty.
    """
    return layer.running_mean is not None and not layer.state_dict()


def head_layers(module: nn.Module) -> list[nn.Module]:
    """Return a list that contains one layer, the network's head. The list is empty if the network has no linear or
    convolution layer.
    """
    registered = [layer for _, layer in module.named_modules(remove_duplicate=False)]
    found: list[nn.Module] = [layer for layer in registered if isinstance(layer, HEAD_TYPES)]
    return found[-1:]


def judges_by_batch(module: nn.Module) -> bool:
    """Return True if a batch norm lacks running statistics; without running statistics, its outputs depend on the batch
    even in evaluation.
    """
    return any(layer.running_mean is None for layer in batch_norm_layers(module))


def mixes_cases(module: nn.Module) -> str | None:
    """Return the type of the first layer that mixes the cases of a batch or stores statistics over cases."""
    for layer in module.modules():
        if (isinstance(layer, _BatchNorm) and not is_frozen(layer)) or (
            isinstance(layer, _InstanceNorm) and layer.track_running_stats
        ):
            return type(layer).__name__
    return None
