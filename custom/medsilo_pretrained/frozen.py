"""Store frozen tensors as buffers that no state dict contains and no gradient changes. In memory, all networks of a
process share the frozen tensors.

Methods, optimizers, secure aggregation, privacy accounting, saved states and disclosure reports work on state dicts and
parameters. Frozen tensors are in no state dict and are no parameters, so code for state dicts and parameters needs no
special case.
"""

from collections.abc import Collection, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from medsilo.extend import MedsiloError

Key = tuple[str, ...]
MULTIPLY = {
    functional.linear,
    *(getattr(functional, f"conv{turned}{n}d") for turned in ("", "_transpose") for n in (1, 2, 3)),
}


class Frozen(Tensor):
    """A tensor that never changes, and that all copies of a network on a device share."""

    # makes operations on frozen tensors return plain tensors
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def to(self, *wanted: Any, **how: Any) -> Any:
        """Return the frozen tensor on the given device, in the given number type. For each device and type, a copy of
        the tensor is created only once.
        """
        found = super().to(*wanted, **how)
        if found is self:
            return self
        there: dict[Any, Frozen] = self.__dict__.setdefault("there", {})
        kind = type(self) if found.dtype is self.dtype else Rounded
        return there.setdefault((found.device, found.dtype), found.as_subclass(kind))


class Rounded(Frozen):
    """A frozen tensor that is stored in a lower precision than that of the network's computations."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in MULTIPLY and not torch.is_autocast_enabled(given[0].device.type):
                kind = given[0].dtype
                given = [Tensor.to(own, kind) if isinstance(own, Rounded) else own for own in given]
            return function(*given, **(named or {}))


def keep_rounded(network: nn.Module) -> None:
    """Store the weights of frozen linear layers and convolutions in bfloat16, because mixed precision converts these
    weights to bfloat16 in any case.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | _ConvNd):
            for name, buffer in layer._buffers.items():
                layer._buffers[name] = buffer.to(torch.bfloat16) if isinstance(buffer, Frozen) else buffer


def freeze(network: nn.Module, trained: Collection[str], known: MutableMapping[Key, Frozen], key: Key = ()) -> None:
    """Freeze all parameters of a network that `trained` does not name, and all buffers of layers in which no parameter
    is trained.

    Args:
        known: Frozen tensors of earlier networks, by `key` and name. They are reused, and new tensors are added.
        key: Identifies the origin of the values.
    """
    learns = {id(own) for name, own in network.named_parameters(remove_duplicate=False) if name in trained}
    done: dict[int, Frozen] = {}

    def frozen(name: str, tensor: Tensor) -> Frozen:
        if id(tensor) not in done:
            own = (*key, name, str(tensor.shape))
            done[id(tensor)] = known.setdefault(own, tensor.detach().as_subclass(Frozen))
        return done[id(tensor)]

    for prefix, layer in network.named_modules():
        tracks = isinstance(layer, _InstanceNorm) and layer.track_running_stats
        if tracks or isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            raise MedsiloError(f"network.train: a layer of kind {type(layer).__name__} can't be frozen; set it to all")
        whole = {name: f"{prefix}.{name}" if prefix else name for name in (*layer._parameters, *layer._buffers)}
        held = {
            name: parameter
            for name, parameter in layer._parameters.items()
            if parameter is not None and id(parameter) not in learns
        }
        for name, own in held.items():
            del layer._parameters[name]
            layer.register_buffer(name, frozen(whole[name], own), persistent=False)
        if not any(own is not None for own in layer._parameters.values()):
            for name, buffer in layer._buffers.items():
                if buffer is not None and name not in held:
                    layer._buffers[name] = frozen(whole[name], buffer)
                    layer._non_persistent_buffers_set.add(name)
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
                # A frozen batch norm layer must not count batches, because its counter would have to be in every state
                # dict.
                layer.track_running_stats = False
                layer.register_forward_pre_hook(_use_statistics)


def _use_statistics(layer: nn.Module, inputs: Any) -> None:
    """Make a frozen batch norm layer use its running statistics, even while the network is in training mode."""
    layer.training = False


def values_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each tensor of a network, including frozen tensors."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)
