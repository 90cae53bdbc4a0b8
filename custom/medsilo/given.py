"""Classes and data of a program's own, such as a notebook's: hashed by their source, known in this process only.

No hospital takes any of it: `medsilo new` writes the package that others install.
"""

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import numpy as np
import torch
from pydantic import create_model
from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.package import ROOT
from medsilo.course.algorithm import Algorithm
from medsilo.models.network import Network
from medsilo.registry import METHODS, NETWORKS, TASKS, Registry
from medsilo.tasks.classification import Classification
from medsilo.tasks.goal import Goal, Regression
from medsilo.tasks.own.folder import goal_of
from medsilo.tasks.splits import parts_in_turn
from medsilo.tasks.survey import PARTS
from medsilo.tasks.task import Cases, Dealt, SiteData, Task

LABEL, PATIENT = "label", "patient"  # columns of a frame; all others are inputs
INSTALLED = [ROOT, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
SIMPLE = (bool, int, float, str, bytes, tuple, type(None))  # values that count as source
KINDS = ("classification", "segmentation", "regression")
MOST_CLASSES = 1000
FORMS = (
    "a Dataset of (input, target), arrays (inputs, targets[, patients]), a frame with a column 'label', or these "
    "as a dictionary of train, validation and test"
)
Kind = str | Goal | type[Task] | Task | Mapping[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------- the hash
def source_hash(*things: Any) -> str:
    """Return a SHA-256 over the source of classes and functions, and of all of their program's that they name."""
    found: dict[str, str] = {}
    waiting = list(things)
    while waiting:
        one = waiting.pop()
        if (key := f"{one.__module__}.{one.__qualname__}") in found:
            continue
        try:
            found[key] = "\n".join(map(inspect.getsource, _functions(one)))
        except OSError as error:
            told = f"the source of {one.__qualname__} is not known; write it in a file or in a cell of a notebook"
            raise MedsiloError(told) from error
        named = {**vars(one), "fields": repr(getattr(one, "model_fields", ""))} if isinstance(one, type) else {}
        for function in _functions(one):
            named |= {name: function.__globals__.get(name) for name in _names(function.__code__)}
        found |= {f"{key}:{name}": repr(value) for name, value in named.items() if isinstance(value, SIMPLE)}
        waiting += filter(_is_own, [*named.values(), *(one.__mro__ if isinstance(one, type) else ())])
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _functions(one: Any) -> Iterator[Any]:
    members = vars(one).values() if isinstance(one, type) else [one]
    plain = (getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members)
    yield from (function for function in plain if inspect.isfunction(function) and _is_own(function))


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _is_own(thing: Any) -> bool:
    """Return whether a class or function belongs to no installed package."""
    if not (isinstance(thing, type) or inspect.isfunction(thing)):
        return False
    file = getattr(sys.modules.get(thing.__module__), "__file__", None)
    own = file and not any(Path(file).is_relative_to(place) for place in INSTALLED)
    return bool(own) or thing.__module__ == "__main__"


# ---------------------------------------------------------------------------------------------------- sections
def method(given: str | Algorithm | type[Algorithm]) -> dict[str, Any]:
    """Return a plan's section of a method: by its name, or of a class of one's own, which is known from now on."""
    return _section(METHODS, given, Algorithm)


def model(given: Any) -> dict[str, Any]:
    """Return a plan's section of a network: by its name, or of a torch module's class, or a function that makes one."""
    if isinstance(given, nn.Module):
        raise MedsiloError(f"model: give the class {type(given).__name__} and no module of it: each site makes its own")
    if not callable(given) or (isinstance(given, type) and issubclass(given, Network)):
        return _section(NETWORKS, given, Network)
    every = inspect.signature(given).parameters.values()
    needed = [
        one.name for one in every if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise MedsiloError(f"model: {given.__name__} takes {', '.join(needed)}; let it take channels and classes")

    def build(self: Network, channels: int, classes: int) -> nn.Module:
        return given(channels, classes) if needed else given()

    source = source_hash(given)
    name = f"{given.__name__.strip('<>').replace('_', '-').lower()}-{source[:8]}"
    return _told(NETWORKS, type("Given", (Network,), {"build": build}), name, source)


def _section(table: Registry, given: Any, base: Any) -> dict[str, Any]:
    kind: Any = given if isinstance(given, type) else type(given)
    if isinstance(given, str):
        return {"name": given}
    if not issubclass(kind, base) or not isinstance(kind.model_fields["name"].default, str):
        raise MedsiloError(f"{kind.__name__} is no {base.__name__} with a name; derive it from medsilo.extend")
    if table.get(name := kind.model_fields["name"].default) is not kind:
        table.give(kind, source_hash(kind))
    return {"name": name} if kind is given else given.model_dump(mode="json")


def _told(table: Registry, base: Any, name: str, source: str) -> dict[str, Any]:
    """Make a class of a section under a name, and tell the registry."""
    own: dict[str, Any] = {"name": (Literal[name], name)}
    table.give(create_model(name, __base__=base, __module__=__name__, **own), source)
    return {"name": name}


class GivenTask(Task):
    """Cases that a program has given. A class is made for each call, with its goal, shape and sites."""

    @property
    def goal(self) -> Goal:
        return self._goal  # type: ignore[attr-defined]

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape  # type: ignore[attr-defined]

    def default_network(self) -> Network | str:
        if self.goal.output_of(self.shape) != (self.goal.outputs,):
            return NETWORKS["unet"](dimensions=len(self.shape) - 1)
        return {1: "linear", 2: "activity-cnn"}.get(len(self.shape), "small-cnn")

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        return self._sites[site]  # type: ignore[attr-defined]


def task(kind: Kind | None, sites: Mapping[str, Any], loss: Loss | None = None) -> dict[str, Any]:
    """Return a plan's section of a task: what is to be learned of the cases that a program gives for each site."""
    if not sites:
        if loss:
            raise MedsiloError("loss: it belongs to data of your own, given as sites={'a': ..., 'b': ...}")
        return dict(kind) if isinstance(kind, Mapping) else _section(TASKS, kind, Task)
    if loss and not inspect.isfunction(loss):
        raise MedsiloError(f"loss: {loss!r} is no function; write 'def my_loss(outputs, targets): ...' around it")
    parts = {site: _parts(own, site) for site, own in sites.items()}
    every: list[Any] = [getattr(own, part) for own in parts.values() for part in PARTS]
    shapes = {tuple(data[0][0].shape) for data in every}
    if len(shapes) > 1 or () in shapes:
        raise DataError(f"sites: inputs have the shapes {sorted(shapes)}; give all one shape, [channels, ...]")
    (shape,), goal = shapes, kind if isinstance(kind, Goal) else _goal(kind or KINDS[0], every)
    if loss:
        goal = copy(goal)
        vars(goal).update(loss=_of_a_batch(loss), unbounded="a loss of your own has no known bound", cross_entropy=0.0)
    said = f"{type(goal).__name__} {goal.outputs} {goal.label_names} {getattr(goal, 'limits', '')} {shape}"
    source = source_hash(*([loss] if loss else []), *filter(_is_own, [type(goal)]))
    source = hashlib.sha256((said + source).encode()).hexdigest()
    title = f"{type(goal).__name__.lower()} of this program's data"
    made = type("Given", (GivenTask,), {"title": title, "__annotations__": {}})
    for key, value in (("_goal", goal), ("_shape", shape), ("_sites", parts)):
        setattr(made, key, value)
    return _told(TASKS, made, f"own-data-{source[:8]}", source)


def _of_a_batch(loss: Loss) -> Loss:
    """Return the loss, which says it when it gives no mean."""

    @wraps(loss)
    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        mean = loss(outputs, targets)
        if not isinstance(mean, Tensor) or mean.ndim:
            given = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else repr(mean)
            raise DataError(
                f"loss: {loss.__name__} gives {given}; return the batch's mean, a tensor without dimensions"
            )
        return mean

    return checked


def _goal(kind: Any, every: Sequence[Any]) -> Goal:
    """Return the goal of a word, with the labels that occur."""
    if kind not in KINDS:
        raise MedsiloError(f"task: {kind!r} needs no data of yours; choose of {', '.join(KINDS)}, or give a Goal")
    targets = [data[case][1] for data in every for case in range(len(data))]
    low, high = min(float(one.min()) for one in targets), max(float(one.max()) for one in targets)
    if kind == "regression" and low < high:
        return Regression((low, high))
    if low < 0 or not 1 <= high < MOST_CLASSES or any(one.is_floating_point() for one in targets):
        raise DataError(f"sites: labels are from {low:g} to {high:g}; give classes as whole numbers 0, 1, 2, ...")
    labels = tuple(map(str, range(int(high) + 1)))
    return Classification(labels) if kind == KINDS[0] else goal_of(kind, labels[1:])


# ---------------------------------------------------------------------------------------------------- cases
class _Read(Dataset):
    """A data set of the program's own, whose cases become tensors when they are read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.shape = inner, np.shape(inner[0][0])
        self.patients = tuple(map(str, getattr(inner, "patients", range(len(inner)))))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, case: int) -> tuple[Tensor, Tensor]:
        values, target, *_ = self.inner[case]
        if np.shape(values) != self.shape:
            raise DataError(f"sites: case {case} has the shape {np.shape(values)}, case 0 {self.shape}; give all one")
        return torch.tensor(np.asarray(values), dtype=torch.float32), _target(target)


def _target(values: Any) -> Tensor:
    given = np.asarray(values)
    if given.dtype.kind not in "biuf":
        raise ValueError("targets are no numbers; give classes as 0, 1, 2, ...")
    found = torch.tensor(given)
    return found.float() if found.is_floating_point() else found.long()


def _parts(given: Any, site: str) -> SiteData:
    """Return one site's data in three parts: as they are given, or with patients dealt in turn."""
    if isinstance(given, SiteData):
        return given
    try:
        if isinstance(given, Mapping):
            return SiteData(*(_cases(given[part]) for part in PARTS))
        whole: Any = _cases(given)
    except (TypeError, ValueError, KeyError, IndexError, AssertionError) as error:
        raise DataError(f"sites: the data of {site} can't be read ({error}); give {FORMS}") from error
    if isinstance(whole, Cases) and not whole.inputs.isfinite().all():
        raise DataError(f"sites: inputs of {site} are NaN or infinite; leave these cases out, or fill them in")
    names = list(dict.fromkeys(whole.patients))
    if len(names) < len(PARTS):
        raise DataError(f"sites: {site} has {len(names)} patients; give 3 or more, for training, validation and test")
    part = dict(zip(names, parts_in_turn(len(names)).tolist(), strict=True))
    labels = whole.targets if isinstance(whole, Cases) and whole.targets.ndim == 1 else None
    parts = np.array([part[one] for one in whole.patients])
    return SiteData.in_parts(parts, lambda places: Dealt(whole, places.tolist(), whole.patients, labels))


def _cases(given: Any) -> Dataset:
    if hasattr(given, "columns"):
        inputs = given.drop(columns=[name for name in (LABEL, PATIENT) if name in given.columns])
        patients = [given[PATIENT]] if PATIENT in given.columns else []
        given = (inputs.to_numpy(np.float32), given[LABEL].to_numpy(), *patients)
    if not isinstance(given, tuple):
        return _Read(given)
    inputs, targets, *patients = given
    values, found = torch.tensor(np.asarray(inputs), dtype=torch.float32), _target(targets)
    found = found.long() if bool((found == found.round()).all()) else found
    return Cases(values, found, list(map(str, patients[0] if patients else range(len(values)))))
