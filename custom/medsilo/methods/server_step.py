"""The base of methods whose server makes a step of its own with the trained weights."""

from abc import abstractmethod

import torch
from torch import nn

from medsilo.core.tensors import Modules, Tensors
from medsilo.course.algorithm import without
from medsilo.course.phase import Group, ServerSide
from medsilo.methods.fedavg import Averaging
from medsilo.mixing.mixers import Mixer


class ServerStep(Averaging):
    """The server steps with the trained weights; all other tensors, such as running statistics, are averaged."""

    def groups(self) -> tuple[Group, ...]:
        return Group("model", trained_weights, self.step), Group(
            "buffers", other_tensors, self.mean, title="running statistics"
        )

    @abstractmethod
    def step(self, server: ServerSide) -> Mixer:
        """Return the server's step with the trained weights."""


def trained_weights(modules: Modules) -> Tensors:
    """Return the model's parameters."""
    model = modules["model"]
    everything = model.state_dict()
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: everything[name] for name in names if name in everything}


def other_tensors(modules: Modules) -> Tensors:
    """Return the model's buffers."""
    return without(modules["model"].state_dict(), list(trained_weights(modules)))


def learning_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that learn."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def zeros_like(model: nn.Module) -> nn.ParameterList:
    """Return zeros in the shapes of the weights that learn: what a site or the server begins to collect for them."""
    return nn.ParameterList(nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in learning_weights(model))
