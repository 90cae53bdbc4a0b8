"""Change a plan's values from the command line, and name the hospitals of a simulation."""

from collections.abc import Iterable, Mapping
from typing import Any

from medsilo.core.errors import PlanError, YamlError
from medsilo.core.text import plain
from medsilo.core.wording import SHOWN
from medsilo.core.yaml_text import load_yaml
from medsilo.registry import TABLES
from medsilo.schedule.participation import MOST_SITES, names_for

OPTIMIZER, NAMES, DIMENSIONS = "training.optimizer", "participation.sites", "task.dimensions"
# Each optimizer's usual values, which replace the plan's values if a change selects another optimizer.
USUAL: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"learning_rate": 0.01, "weight_decay": 0.0},
    "adam": {"learning_rate": 0.001, "weight_decay": 0.0},
    "adamw": {"learning_rate": 0.001, "weight_decay": 0.01},
}
OWN_NUMBERS = ("learning_rate", "weight_decay", "momentum", "nesterov", "betas")


def change(values: dict[str, Any], changes: Iterable[str]) -> None:
    """Change a plan's values in place; changes that reset other keys are made first.

    Args:
        changes: Strings of the form "key.subkey=value".
    """
    for change in sorted(changes, key=lambda one: one.partition("=")[0] not in (OPTIMIZER, NAMES)):
        _apply(values, change)


def name_hospitals(values: dict[str, Any]) -> None:
    """If the plan names no hospitals, add names for as many hospitals as the plan requires."""
    part = values.get("participation")
    if isinstance(part, dict) and not part.get("sites") and part.get("minimum") in range(1, MOST_SITES + 1):
        values["participation"] = {**part, "sites": names_for(part["minimum"]), "minimum": None}


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise PlanError(f"--set {change!r}: write it as key.subkey=value, for example training.rounds=3")
    *path, last = key.split(".")
    place = values
    for part in path:
        inner = place.get(part)
        place[part] = place = dict(inner) if isinstance(inner, dict) else {}
    try:
        value = load_yaml(text)
    except YamlError as error:
        shown = plain(repr(text), SHOWN)
        raise PlanError(f"--set {key}: {shown} is not a value that YAML knows: {error.problem}; quote it") from error
    if last == "name" and len(path) == 1 and path[0] in TABLES:
        value = TABLES[path[0]].spelled(value) or value
    if last == "name" and place.get("name") != value:
        # the section is emptied, because its values belong to the method, task or network that the plan named before
        # the change
        place.clear()
        if path == ["task"]:
            # the network is removed, because it belongs to the task that the plan named before the change
            values.pop("network", None)
    if key == OPTIMIZER and isinstance(value, str) and value in USUAL and place.get(last, "sgd") != value:
        # these values are removed, because they belong to the optimizer that the plan named before the change
        for number in OWN_NUMBERS:
            place.pop(number, None)
        place.update(USUAL[value])
    # the minimum number of sites is removed, because only plans that name no hospitals need a minimum
    if key == NAMES and value and not place.get(last):
        place.pop("minimum", None)
    if key == DIMENSIONS and value == 2 and place.get(last, 3) == 3:
        _learn_slices(values)
    place[last] = value


def _learn_slices(values: dict[str, Any]) -> None:
    """Change a plan that trains on volumes into a plan that trains on slices."""
    task, network = values["task"], values.get("network")
    task.update({key: task[key][:2] for key in ("size", "target_spacing") if isinstance(task.get(key), list)})
    if isinstance(network, dict) and "dimensions" in network:
        values["network"] = {**network, "dimensions": 2}
