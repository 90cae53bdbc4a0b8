"""The base class of all networks that a plan may name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.core.section import Feature
from medsilo.core.tensors import precision_of

Activation = Annotated[
    Literal["relu", "leaky-relu", "prelu"],
    Field(
        description="activation after each convolution; `leaky-relu` has slope 0.1, `prelu` learns its slope",
        exclude_if=lambda name: name == "relu",
    ),
]
Dimensions = Annotated[Literal[2, 3], Field(description="2: flat images and slices; 3: volumes")]
# A network is tested on the CPU only if its number of parameters, times the values of a case, is at most this number.
# On the CPU, the test of a network takes a fraction of a second and at most 64 MiB of memory.
LITTLE_WORK = 1 << 34
MOST_OUTPUTS = 64  # limit on the number of networks whose outputs are remembered
MOST_GROUPS = 8
BATCH_NORMS: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

# the output of each network that was tried, by the plan's sections from which the network follows
_OUTPUTS: dict[tuple[Any, ...], tuple[int, ...] | str | None] = {}


class Network(Feature):
    """A plan's network, with the network's name and settings. The method `build` creates the module. For a network of
    MONAI, the class defines the method `monai` instead of `build`.

    A subclass declares `name: Literal["..."] = "..."` and the settings of its network.

    >>> from typing import Literal
    >>> from torch import nn
    >>> class Straight(Network):
    ...     name: Literal["straight"] = "straight"
    ...     def build(self, channels: int, classes: int) -> nn.Module:
    ...         return nn.Linear(channels, classes)
    >>> Straight().build(3, 2)
    Linear(in_features=3, out_features=2, bias=True)
    >>> [norm.num_groups for norm in Network.norm_layer(dimensions=2, features=16, norm="group")]
    [8]
    """

    NORM: ClassVar[str] = (
        "type of the normalisation layers; `batch-statistics` is batch norm without weights. It normalises "
        "every batch, even in tests, by the batch's own statistics"
    )
    # In medsilo, instance norm has weights, as batch norm does, although MONAI's instance norm has no weights by
    # default.
    MONAI_NORMS: ClassVar[Mapping[str, Any]] = {
        "batch": "BATCH",
        "batch-statistics": ("BATCH", {"affine": False, "track_running_stats": False}),
        "instance": ("INSTANCE", {"affine": True}),
        "instance-statistics": "INSTANCE",
        "none": None,
    }
    MONAI_ACTIVATIONS: ClassVar[Mapping[str, Any]] = {
        "relu": ("RELU", {"inplace": True}),
        "leaky-relu": ("LEAKYRELU", {"negative_slope": 0.1, "inplace": True}),
        "prelu": "PRELU",
    }
    MOST_PARAMETERS: ClassVar[int] = 500_000_000  # limit on the total number of parameters of all networks of a method

    name: str

    def build(self, channels: int, classes: int) -> nn.Module:
        """Return a module whose initial weights come from torch's global random generator.

        Args:
            channels: number of an input's channels, or of values in a table's row
            classes: number of outputs for each case, or for each pixel or voxel of a segmentation
        """
        from monai.networks import nets  # imported within the method, because importing MONAI takes seconds

        told = dict(self.monai(channels, classes) or {})
        made = getattr(nets, str(told.pop("_target_", "")).rpartition(".")[2], None)
        if made is None:
            raise MedsiloError(f"network {self.name} has no build(), and its monai is not the name of a MONAI network")
        return made(**told)

    def monai(self, channels: int, classes: int) -> dict[str, Any] | None:
        """Describe the module as an entry of a MONAI bundle; return None if MONAI does not have this network.

        Args:
            channels, classes: as for `build`
        """
        return None

    @staticmethod
    def norm_layer(dimensions: int, features: int, norm: str) -> list[nn.Module]:
        """Return a list that contains the norm layer, or an empty list for no norm.

        Args:
            dimensions: 1, 2 or 3, as in the name of PyTorch's batch norm
            features: number of features
            norm: "batch", "batch-statistics", "group" or "none"
        """
        if norm == "batch":
            return [BATCH_NORMS[dimensions](features)]
        if norm == "batch-statistics":  # HarmoFL's released code uses the norm "batch-statistics"
            return [BATCH_NORMS[dimensions](features, affine=False, track_running_stats=False)]
        return [nn.GroupNorm(math.gcd(MOST_GROUPS, features), features)] if norm == "group" else []

    def settled(self, module: nn.Module, compute: Any) -> nn.Module:
        """Move the built module to a site's device.

        Args:
            module: the built module
            compute: an object whose attribute `device` is the site's device
        """
        return module.to(compute.device)

    @property
    def files(self) -> Mapping[str, int]:
        """Return the files that are needed to build the network with its pre-trained values: a mapping from each file's
        SHA-256 to its size in bytes.
        """
        return {}

    def translated(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rename the tensors of a weight file to the names that the built module uses."""
        return tensors

    @property
    def embedding(self) -> str:
        """Return a key for the cached outputs of a network's frozen layers, or an empty string if these outputs can't
        be cached.
        """
        return ""

    def embed(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the outputs of a network's frozen layers. A network with an `embedding` overrides this method.

        Args:
            module: the built module
            inputs: a batch of inputs
        """
        raise NotImplementedError

    @property
    def plain(self) -> "Network":
        """Return the network that remains after training: the inner network if this network is a wrapper, and otherwise
        this network itself.
        """
        return self

    def finished(self, module: nn.Module, channels: int, classes: int) -> nn.Module:
        """Convert the module to the network that remains after training; both compute the same outputs.

        Args:
            module: the built module, with trained weights
            channels, classes: as for `build`
        """
        return module

    def conflicts(self, plan: Any, networks: Mapping[str, nn.Module]) -> Iterable[str]:
        """Yield an error if the network has too many parameters, or can't read the task's cases."""
        if (parameters := parameters_of(networks)) > self.MOST_PARAMETERS:
            yield f"network: has {parameters} parameters with all of the method's; {self.MOST_PARAMETERS} may be"
        if any(own.is_complex() for network in networks.values() for own in network.state_dict().values()):
            yield "network: has complex numbers, which can't be averaged; use real and imaginary parts"
        task, shape = plan.task, plan.task.shape
        if shape is None:
            return
        alone = plan.training.batch_size == 1
        output = _output_of(plan, networks["model"], alone)
        if output is None:
            yield (
                f"network.name: {self.name} can't read the inputs of task {task.name}, of shape {list(shape)}; choose "
                f"another network, its numbers{', training.batch_size' if alone else ''} or task.size"
            )
            return
        if isinstance(output, str):
            yield (
                f"network.name: {self.name} returns a {output}; write a module around it whose forward "
                "returns one tensor, such as its logits"
            )
            return
        if (needed := task.goal.output_of(shape)) != output:
            other = task.default_network()
            yield (
                f"network.name: {self.name} gives {_in_words(output)}, and task {task.name} needs {_in_words(needed)}; "
                f"choose another network, for example {getattr(other, 'name', other)}"
            )


def parameters_of(networks: Mapping[str, nn.Module]) -> int:
    return sum(tensor.numel() for network in networks.values() for tensor in network.parameters())


def _output_of(plan: Any, model: nn.Module, alone: bool) -> tuple[int, ...] | str | None:
    """Return the shape of a network's output for one case of the plan's task. If the output is no tensor, return the
    name of the output's type; if the network can't read the case, return None.

    A command reads and changes a plan several times, so a network that was already tried is not tried again.

    Args:
        alone: whether to try a batch of one case, too, because batch norm may be unable to train on it
    """
    sections = (plan.network, plan.algorithm, plan.task, plan.participation)
    known = (alone, *((type(section), section.model_dump_json()) for section in sections))
    if known not in _OUTPUTS:
        if len(_OUTPUTS) >= MOST_OUTPUTS:
            _OUTPUTS.clear()
        _OUTPUTS[known] = _tried_output(model, plan.task.shape, alone)
    return _OUTPUTS[known]


def _tried_output(model: nn.Module, shape: Sequence[int], alone: bool) -> tuple[int, ...] | str | None:
    try:
        if alone:
            tried(model.train(), shape, 1)
        output = tried(model.eval(), shape)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__


@torch.no_grad()
def tried(model: nn.Module, shape: Sequence[int], cases: int = 2) -> Any:
    """Apply a network to zeros in the shape of a task's cases, to test the network; a large network runs on torch's
    meta device.

    Small networks run on the CPU, because torch's meta device must first load its compiler, which takes more time than
    the run. The network runs in one thread, because a process that has computed in several threads and then forks makes
    the forked process wait forever.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    place = "cpu" if sum(own.numel() for _, own in tensors) * max(math.prod(shape), 1024) <= LITTLE_WORK else "meta"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # set first, because even filling a large tensor would start threads
    try:
        weights = {name: torch.zeros(own.shape, dtype=own.dtype, device=place) for name, own in tensors}
        inputs = torch.zeros(cases, *shape, dtype=precision_of(model), device=place)
        return torch.func.functional_call(model, weights, inputs)
    finally:
        torch.set_num_threads(threads)


def _in_words(output: Sequence[int]) -> str:
    classes, *grid = output
    return (
        f"a map of {' × '.join(map(str, grid))} with {classes} classes" if grid else f"{classes} scores, one per class"
    )
