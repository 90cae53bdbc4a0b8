"""Read the settings of a script's optimizer, and create optimizers with the same settings for other networks."""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature

from pydantic import PrivateAttr
from torch import nn
from torch.optim import Optimizer

from medsilo.core.errors import MedsiloError
from medsilo.learning.training import Training


def twin(optimizer: Optimizer, parameters: Sequence[nn.Parameter], of: Sequence[nn.Parameter]) -> Optimizer:
    """Create an optimizer for another network, with the class and the settings of a given optimizer.

    Args:
        parameters: The weights of the other network.
        of: The weights that the given optimizer updates.
    """
    groups, others = optimizer.param_groups, dict(zip(map(id, of), parameters, strict=False))
    if len(of) != len(parameters):
        groups = [{**groups[0], "params": list(parameters)}]
    elif any(id(own) not in others for group in groups for own in group["params"]):
        raise MedsiloError("join: the optimizer has weights besides the model's; give one of model.parameters() alone")
    else:
        groups = [{**group, "params": [others[id(own)] for own in group["params"]]} for group in groups]
    takes = signature(type(optimizer)).parameters
    return type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in takes})


class ScriptTraining(Training):
    _twin: Callable[[list[nn.Parameter]], Optimizer] = PrivateAttr()
    _steps: Callable[[], int] = PrivateAttr()

    @classmethod
    def of(cls, training: Training, optimizer: Optimizer, model: nn.Module, steps: Callable[[], int]) -> Training:
        """Replace the optimizer settings of the plan by the settings of the script's optimizer.

        Args:
            steps: Returns the number of optimizer steps in a round.
        """
        own = optimizer.param_groups[0]
        adam = "betas" in own
        numbers = {
            "optimizer": "adam" if adam else "sgd",
            "learning_rate": float(own["lr"]),
            "momentum": float(own.get("momentum", 0.0)),
            "nesterov": bool(own.get("nesterov", False)),
            "weight_decay": float(0.0 if own.get("decoupled_weight_decay") else own.get("weight_decay", 0.0)),
        }
        made = cls.model_construct(**{**training.model_dump(), **numbers})
        made._twin = lambda parameters: twin(optimizer, parameters, list(model.parameters()))
        made._steps = steps
        return made

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self._twin(list(parameters))

    def steps_of_round(self, in_epoch: int) -> int:
        return self._steps() or super().steps_of_round(in_epoch)
