"""Mixing of a network's last layer by structure: what finds a structure is learned from the hospitals that drew it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from medsilo.core.tensors import Modules, Tensors
from medsilo.course.group import Group
from medsilo.course.server_side import ServerSide
from medsilo.learning.layers import names_of_last_layers
from medsilo.mixing.mixers import Mixer, UniformMean, WeightedMean
from medsilo.mixing.spread import Numbers
from medsilo.tasks.segmentation import Segmentation


def mixer_of(group: Group, layout: Modules, server: ServerSide, plain: bool) -> Mixer:
    """Return a group's mixer. plain: whether sites' tensors are read one by one and averaged by no robust rule."""
    mixer = group.mix(server)
    if plain:
        mix_by_structure(mixer, group.of(layout), layout["model"], server)
    return mixer


def mix_by_structure(mixer: Mixer, tensors: Tensors, model: nn.Module, server: ServerSide) -> None:
    """Let a plain mean weigh each output of the last layer by the sites that drew its structure.

    tensors: what it mixes, in which the last layer has to be. Nothing changes where all sites drew all structures.
    """
    goal = server.task.goal
    absent = {site: answer.absent for site, answer in server.joined.items() if answer.absent}
    if not (absent and isinstance(goal, Segmentation) and type(mixer) in (WeightedMean, UniformMean)):
        return
    assert isinstance(mixer, WeightedMean)
    axes = outputs_of(model, goal.outputs)
    shapes = {name: model.get_parameter(name).shape for name in axes}
    same = all(name in tensors and tensors[name].shape == shapes[name] for name in axes)
    if mixer.weigh is not None or not axes or not same:
        return

    def weigh(site: str, samples: float) -> Numbers:
        drawn = torch.tensor([float(name not in absent.get(site, ())) for name in goal.label_names])
        return dict.fromkeys(tensors, samples) | {
            name: samples * _along(drawn, axes[name], shapes[name]) for name in axes
        }

    mixer.weigh = weigh


def outputs_of(model: nn.Module, outputs: int) -> Mapping[str, int]:
    """Return the axis of the outputs in each tensor of a model's last layer; nothing where it has not so many."""
    found = {}
    for name in names_of_last_layers(model, 1):
        weight, layer = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
        axis = int(weight.ndim > 1 and isinstance(layer, nn.modules.conv._ConvTransposeNd))
        if weight.shape[axis] != outputs:
            return {}
        found[name] = axis
    return found


def _along(numbers: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """Return a tensor of a shape with these numbers along an axis."""
    return numbers.reshape([-1 if place == axis else 1 for place in range(len(shape))]).expand(shape)
