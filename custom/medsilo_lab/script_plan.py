"""Create the plan of a study in which a user's script trains the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from medsilo.plan import Plan, parse_plan
from medsilo_script.network import ScriptNetwork

INITIAL = "initial.safetensors"


def plan_of_script(
    model: nn.Module,
    folder: Path,
    method: Mapping[str, Any],
    *,
    rounds: int,
    minimum: int,
    sites: Sequence[str] = (),
    metric: str = "accuracy",
    lower_is_better: bool = False,
    input_shape: Sequence[int] | None = None,
    seed: int | None = None,
    logs: Sequence[str] = (),
    further: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of a study in which a script trains a model, and write the model's initial weights into a folder.

    Args:
        folder: the folder for the file with the initial weights
        metric: the name of the metric that selects the best model
        lower_is_better: whether lower values of the metric are better
        input_shape: the shape of one input, if the method needs the shape
        seed: a seed for reproducible random numbers of the script
        logs: the names of numbers that the script logs
        further: further keys of the plan
    """
    seed = (further or {}).get("seed", seed)
    own: dict[str, Any] = {
        "algorithm": dict(method),
        "task": {
            "name": "script",
            "metric": metric,
            "lower_is_better": lower_is_better,
            "input_channels": first_channels(model),
            "input_shape": list(input_shape) if input_shape else None,
            "repeats": seed is not None,
            "logs": list(logs),
        },
        "network": ScriptNetwork.section(model, folder / INITIAL),
        "training": {"rounds": rounds},
        "participation": {"sites": list(sites), "minimum": minimum},
        "seed": seed or 0,
    }
    for key, value in (further or {}).items():
        own[key] = own.get(key, {}) | value if isinstance(value, Mapping) else value
    return parse_plan(own)


def first_channels(model: nn.Module) -> int:
    """Return the number of input channels of a network. The number is read from the first layer with input channels,
    such as a convolution.

    >>> first_channels(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 1)))
    3
    """
    found = (getattr(layer, name, None) for layer in model.modules() for name in ("in_channels", "in_features"))
    return next((number for number in found if isinstance(number, int)), 1)
