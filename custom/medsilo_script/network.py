"""Describe the network of a user's script, so that the server can build the network without the script's code.

A plan lists the network's layers with the layers' types and tensor shapes. Methods use the layers' types to find
normalisation layers and heads. The job contains a file with the initial weights; the name of the file is the hash of
its content.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from medsilo.core import weight_cache
from medsilo.core.errors import MedsiloError, PlanError
from medsilo.core.files import save_tensors
from medsilo.core.section import Section
from medsilo.core.tensors import is_finite
from medsilo.models.network import Network

MOST_LAYERS, MOST_AXES = 20_000, 8
Name = Annotated[str, Field(max_length=300)]
Size = Annotated[int, Field(ge=0, le=1 << 40)]

# the layer types that methods distinguish; any other layer is described as a plain module
KINDS: Mapping[str, type[nn.Module]] = {
    kind.__name__.strip("_"): kind
    for kind in (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.Linear, _ConvTransposeNd, _ConvNd)
}
# names of layer attributes that may contain the number of input channels
NUMBERS = ("num_features", "num_channels", "in_features", "in_channels")
DTYPES: Mapping[str, torch.dtype] = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class TensorShape(Section):
    name: Name
    shape: Annotated[tuple[Size, ...], Field(max_length=MOST_AXES)]
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    learns: bool | None = None  # True for a trained parameter, False for a frozen parameter, None for a buffer
    # full name of the parameter that shares its memory with this tensor, if there is such a parameter
    same_as: Name = ""


class LayerShape(Section):
    name: Name
    kind: Literal[("", *KINDS)] = ""  # type: ignore[valid-type]
    numbers: dict[Literal[NUMBERS], Size] = {}  # type: ignore[valid-type]
    tensors: tuple[TensorShape, ...] = Field((), max_length=MOST_LAYERS)


def layers_of(model: nn.Module) -> tuple[LayerShape, ...]:
    """Return descriptions of a network's layers, in the order of their registration.

    >>> [layer.kind for layer in layers_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))]
    ['', 'Linear', '']
    """
    seen: dict[int, str] = {}
    return tuple(_layer(name, layer, seen) for name, layer in model.named_modules(remove_duplicate=False))


def _layer(name: str, layer: nn.Module, seen: dict[int, str]) -> LayerShape:
    kind = next((known for known, own in KINDS.items() if isinstance(layer, own)), "")
    numbers = {own: int(getattr(layer, own)) for own in NUMBERS if kind and isinstance(getattr(layer, own, None), int)}
    tensors = [
        _tensor(own, f"{name}.{own}".lstrip("."), value, seen)
        for own, value in {**layer._parameters, **layer._buffers}.items()
        if value is not None and own not in layer._non_persistent_buffers_set
    ]
    return LayerShape(name=name, kind=kind, numbers=numbers, tensors=tuple(tensors))


def _tensor(name: str, full: str, value: Tensor, seen: dict[int, str]) -> TensorShape:
    dtype = str(value.dtype).removeprefix("torch.")
    if is_lazy(value):
        raise MedsiloError(f"model: {full} has no shape before its first batch; call the model once with a batch")
    if dtype not in DTYPES:
        raise MedsiloError(f"model: {full} has the type {dtype}, which cannot be sent; use floats and integers")
    if value.layout is not torch.strided or value.ndim > MOST_AXES:
        raise MedsiloError(
            f"model: {full} is not a dense tensor with at most {MOST_AXES} dimensions, and cannot be sent"
        )
    shape = TensorShape(name=name, shape=tuple(value.shape), dtype=dtype)
    if not isinstance(value, nn.Parameter):
        return shape
    first = seen.setdefault(id(value), full)
    return shape.model_copy(update={"learns": value.requires_grad, "same_as": first if first != full else ""})


def skeleton(layers: Iterable[LayerShape]) -> nn.Module:
    """Return a network of zeros with the described layers, which has no forward pass.

    Raise PlanError if the description of a layer is invalid.
    """
    root = nn.Module()
    parameters: dict[str, nn.Parameter] = {}
    for shape in layers:
        try:
            layer = _made(shape, parameters)
            if not shape.name:
                root = layer
                continue
            above, _, own = shape.name.rpartition(".")
            root.get_submodule(above).register_module(own, layer)
        # several kinds of errors are caught, because PyTorch raises different errors for different invalid layers
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise PlanError(
                f"network.layers: {shape.name!r} is not a valid layer; let a recipe write the plan"
            ) from error
    return root


def _made(shape: LayerShape, parameters: dict[str, nn.Parameter]) -> nn.Module:
    kind = KINDS.get(shape.kind, nn.Module)
    layer = kind.__new__(kind)  # the layer's constructor is not called, because it would make random weights
    nn.Module.__init__(layer)
    for name, number in shape.numbers.items():
        setattr(layer, name, number)
    if issubclass(kind, _BatchNorm | _InstanceNorm):
        setattr(layer, "track_running_stats", any(tensor.name == "running_mean" for tensor in shape.tensors))  # noqa: B010
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            layer.register_buffer(name, None)
    for own in shape.tensors:
        values = torch.zeros(own.shape, dtype=DTYPES[own.dtype])
        if own.learns is None:
            layer.register_buffer(own.name, values)
            continue
        full = f"{shape.name}.{own.name}".lstrip(".")
        parameter = parameters[own.same_as] if own.same_as else nn.Parameter(values, requires_grad=own.learns)
        parameters[full] = parameter
        layer.register_parameter(own.name, parameter)
    return layer


# classes that wrap a model and rename its tensors
WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
COPIES: dict[str, nn.Module] = {}  # copies of the script's networks in this process, by the hash of the initial weights


class ScriptNetwork(Network):
    """The network of a user's script, described by its layers and the file with its initial weights."""

    name: Literal["script"] = "script"
    layers: tuple[LayerShape, ...] = Field(
        min_length=1,
        max_length=MOST_LAYERS,
        description="description of the network's layers; medsilo's recipe for a training script writes this key",
    )
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$", description="SHA-256 hash of the file with the network's initial weights"
    )
    bytes: int = Field(ge=1, le=1 << 36, description="number of bytes in the file with the initial weights")

    @property
    def files(self) -> dict[str, int]:
        return {self.sha256: self.bytes}

    def build(self, channels: int, classes: int) -> nn.Module:
        if torch.empty(0).is_meta:
            return skeleton(self.layers)
        module = deepcopy(COPIES[self.sha256]) if self.sha256 in COPIES else skeleton(self.layers)
        module.load_state_dict(safetensors.torch.load_file(weight_cache.find(self.sha256, self.bytes)))
        return module

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        if plan.privacy:
            yield "privacy: medsilo cannot account for a training script's privacy; use a medsilo task, or omit privacy"
        if plan.sealed:
            yield "secure_aggregation: a training script sends unmasked tensors; use a medsilo task, or omit it"
        if sum(own.nbytes for own in networks["model"].state_dict().values()) > self.bytes:
            yield "network.layers: the tensors are larger than the file with their weights; let a recipe write the plan"

    @staticmethod
    def section(model: nn.Module, file: Path) -> dict[str, Any]:
        """Write the initial weights of a network into a file, and return the section of the plan that describes the
        network and the file.
        """
        layers = layers_of(model)
        known = {f"{layer.name}.{tensor.name}".lstrip(".") for layer in layers for tensor in layer.tensors}
        if odd := sorted(known ^ model.state_dict().keys()):
            told = "is not in both the layers and the state dict; leave the state dict as torch makes it"
            raise MedsiloError(f"model: {odd[0]} cannot be sent: it {told}")
        for name, value in model.state_dict().items():
            if not is_finite(value):
                raise MedsiloError(f"model: {name} is NaN or infinite; register a mask as buffer with persistent=False")
        save_tensors(file, {name: value.detach().cpu() for name, value in model.state_dict().items()})
        return {
            "name": "script",
            "layers": [layer.model_dump(mode="json", exclude_defaults=True) for layer in layers],
            "sha256": weight_cache.hash_of_file(file),
            "bytes": file.stat().st_size,
        }

    def make_by(self, model: nn.Module) -> None:
        """Make this process build the networks of the plan as copies of the network `model`.

        Each copied network starts with the recipe's initial weights. Raise MedsiloError if the plan describes another
        network.
        """
        described, own = (
            {name: (value.shape, value.dtype) for name, value in skeleton(layers).state_dict().items()}
            for layers in (self.layers, layers_of(model))
        )
        if described != own:
            odd = sorted(name for name in {*described, *own} if described.get(name) != own.get(name))
            remedy = "give both the same model, wrapped or compiled in both or in none"
            if type(model).__name__ in WRAPPERS:
                remedy = f"join with the network inside of {type(model).__name__}, and train by either"
            raise MedsiloError(f"join: the script's and the recipe's model differ in {', '.join(odd[:3])}; {remedy}")
        try:
            COPIES[self.sha256] = deepcopy(model)
        except RuntimeError as error:
            raise MedsiloError(
                f"model: torch can't copy it ({str(error).partition('.')[0]}); for weight_norm and spectral_norm, take "
                "those of torch.nn.utils.parametrizations"
            ) from error
