"""Average each output of a segmentation network's last layer only over the hospitals that annotated this output's
structure.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial

import torch
from torch import Tensor, nn

from medsilo.core.tensors import Groups
from medsilo.mixing.aggregators import Aggregator, UniformMean, WeightedMean
from medsilo.mixing.by_element import MeanByElement
from medsilo.schedule.phase import ServerSide

PLAIN = (WeightedMean, UniformMean)


def mix_by_structure(
    aggregators: MutableMapping[str, Aggregator], groups: Groups, model: nn.Module, server: ServerSide
) -> None:
    """If a site did not annotate all structures, replace the aggregators of the network's last layer, so that each
    output is averaged separately.

    The function replaces an aggregator only if its tensor group contains the whole last layer, and if the aggregator is
    a plain mean.

    Args:
        aggregators: the aggregators by group, which the function changes in place
    """
    goal = server.task.goal
    found = tuple(goal.structures) if goal.overlaps else goal.label_names
    if not goal.structures or not any({*answer.absent} & {*found} for answer in server.joined.values()):
        return
    axes = outputs_of(model, goal.outputs)
    shapes = {name: model.get_parameter(name).shape for name in axes}

    def weigh(names: Iterable[str], site: str, samples: float) -> dict[str, float | Tensor]:
        # the plan contains every structure that the site names, because the server checked this when the site joined
        absent = server.joined[site].absent if site in server.joined else ()
        drawn = torch.tensor([float(name not in absent) for name in found])
        own = {name: samples * _along(drawn, axis, shapes[name]) for name, axis in axes.items()}
        return dict.fromkeys(names, samples) | own

    for group, tensors in groups.items():
        aggregator = aggregators[group]
        same = axes and all(name in tensors and tensors[name].shape == shapes[name] for name in axes)
        if isinstance(aggregator, WeightedMean) and type(aggregator) in PLAIN and same:
            aggregators[group] = MeanByElement(partial(weigh, tensors), aggregator.rate, aggregator.uniform)
            aggregators[group].load_state(*aggregator.state())


def outputs_of(model: nn.Module, outputs: int) -> Mapping[str, int]:
    """For each parameter of a model's last layer, return the index of the parameter's axis that belongs to the layer's
    outputs.

    If the last layer has another number of outputs than the plan has structures, the function returns an empty mapping.
    """
    found = {}
    for name in names_of_last_layers(model, 1):
        weight, layer = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
        axis = int(weight.ndim > 1 and isinstance(layer, nn.modules.conv._ConvTransposeNd))
        if weight.shape[axis] != outputs:
            return {}
        found[name] = axis
    return found


def _along(numbers: Tensor, axis: int, shape: torch.Size) -> Tensor:
    return numbers.reshape([-1 if place == axis else 1 for place in range(len(shape))]).expand(shape)


def names_of_last_layers(module: nn.Module, count: int) -> list[str]:
    """Return the names of the parameters of a network's last layers.

    Args:
        module: the network
        count: the number of layers; layers without parameters are not counted
    """
    owned = [
        [f"{prefix}.{name}" if prefix else name for name, _ in layer.named_parameters(recurse=False)]
        for prefix, layer in module.named_modules()
    ]
    return [name for names in list(filter(None, owned))[-count:] for name in names]
