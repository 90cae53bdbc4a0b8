"""Classes and data of a program's own, such as a notebook's: hashed by their source, known in this process only.

No hospital takes any of it: `medsilo new` writes the package that others install.
"""

import ast
import hashlib
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
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
from medsilo.registry import METHODS, NETWORKS, TASKS, Registry, network
from medsilo.tasks.classification import Classification
from medsilo.tasks.folds import Dealt
from medsilo.tasks.goal import Goal
from medsilo.tasks.own.folder import goal_of
from medsilo.tasks.regression import Regression
from medsilo.tasks.survey import PARTS
from medsilo.tasks.synthetic.hospitals import parts_in_turn
from medsilo.tasks.task import Cases, SiteData, Task

LABEL, PATIENT = "label", "patient"  # columns of a frame; all others are inputs
INSTALLED = [ROOT, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
SIMPLE = (bool, int, float, str, bytes, tuple, type(None))  # constants that count as source
Kind = str | Goal | type[Task] | Task | Mapping[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------- the hash
def source_hash(*things: Any) -> str:
    """Return a SHA-256 over the source of classes and functions, and of all of their program's that they name."""
    found: dict[str, str] = {}
    waiting = list(things)
    while waiting:
        one = waiting.pop()
        if (key := f"{one.__module__}.{one.__qualname__}") not in found:
            found[key] = _source(one)
            waiting += [base for base in one.__mro__[1:] if _is_own(base)] if isinstance(one, type) else []
            for name, value in _named_in(one):
                if isinstance(value, SIMPLE):
                    found[f"{key}:{name}"] = repr(value)
                elif _is_own(value):
                    waiting.append(value)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _source(one: Any) -> str:
    """Return what a class or function was written as, in a file or in a cell of a notebook."""
    try:
        return inspect.getsource(one)
    except (OSError, TypeError):  # a class of a notebook: Python 3.11 and 3.12 look for its module's file
        for function in _functions(one):
            tree = ast.parse("".join(lines := linecache.getlines(function.__code__.co_filename)))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name == one.__name__:
                    return "".join(lines[node.lineno - 1 : node.end_lineno])
    raise MedsiloError(f"the source of {one.__qualname__} is not known; write it in a file or in a cell of a notebook")


def _functions(one: Any) -> Iterator[Any]:
    members = vars(one).values() if isinstance(one, type) else [one]
    plain = (getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members)
    yield from (function for function in plain if inspect.isfunction(function))


def _named_in(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a class or function names."""
    for function in _functions(one):
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):
            yield name, function.__globals__[name]


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


def model(given: str | Network | type[Network] | Callable[..., nn.Module]) -> dict[str, Any]:
    """Return a plan's section of a network: by its name, or of a torch module's class, or a function that makes one."""
    if isinstance(given, nn.Module):
        raise MedsiloError(f"model: give the class {type(given).__name__} and no module of it: each site makes its own")
    if not callable(given) or isinstance(given, Network) or (isinstance(given, type) and issubclass(given, Network)):
        return _section(NETWORKS, given, Network)
    needed = [
        one.name
        for one in inspect.signature(given).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise MedsiloError(f"model: {given.__name__} takes {', '.join(needed)}; let it take channels and classes")
    source = source_hash(given)

    def build(self: Network, channels: int, classes: int) -> nn.Module:
        return given(channels, classes) if needed else given()

    name = f"{given.__name__.strip('<>').replace('_', '-').lower()}-{source[:8]}"
    return _told(NETWORKS, type("Given", (Network,), {"build": build}), name, source)


def _section(table: Registry, given: Any, base: type) -> dict[str, Any]:
    kind = given if isinstance(given, type) else type(given)
    if isinstance(given, str):
        return {"name": given}
    if not issubclass(kind, base) or "name" not in kind.model_fields:
        raise MedsiloError(f"{kind.__name__} is no {base.__name__} with a name; derive it from medsilo.extend")
    if table.get(name := kind.model_fields["name"].default) is not kind:
        table.give(kind, source_hash(kind))
    return {"name": name} if kind is given else given.model_dump(mode="json")


def _told(table: Registry, base: type, name: str, source: str) -> dict[str, Any]:
    """Make a class of a section under a name, and tell the registry."""
    table.give(create_model(name, __base__=base, __module__=__name__, name=(Literal[name], name)), source)
    return {"name": name}


class GivenTask(Task):
    """Cases that a program has given, by site."""

    @property
    def goal(self) -> Goal:
        return self._goal  # type: ignore[attr-defined]

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape  # type: ignore[attr-defined]

    def default_network(self) -> Network:
        if len(self.shape) == 1:
            return network("linear")
        if self.goal.output_of(self.shape) != (self.goal.outputs,):
            return network("unet", dimensions=len(self.shape) - 1)
        return network("small-cnn" if len(self.shape) == 3 else "activity-cnn")

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        return self._sites[site]  # type: ignore[attr-defined]


def task(kind: Kind | None, sites: Mapping[str, Any], loss: Loss | None = None) -> dict[str, Any]:
    """Return a plan's section of a task: what is to be learned of the cases that a program gives for each site."""
    if not sites:
        if loss:
            raise MedsiloError("loss: it belongs to data of your own, given as sites={'a': ..., 'b': ...}")
        return dict(kind) if isinstance(kind, Mapping) else _section(TASKS, kind, Task)
    parts = {site: _parts(own, site) for site, own in sites.items()}
    every = [(site, one) for site, own in parts.items() for part in PARTS for one in [getattr(own, part)]]
    shapes = {site: tuple(data[0][0].shape) for site, data in every}
    if len(set(shapes.values())) > 1:
        raise DataError(f"sites: cases differ in shape ({shapes}); give all one shape")
    goal = kind if isinstance(kind, Goal) else _goal(kind or "classification", [data for _, data in every])
    if loss:
        goal = copy(goal)
        goal.loss, goal.unbounded, goal.cross_entropy = loss, "a loss of your own has no known bound", 0.0  # type: ignore[method-assign]
    shape = next(iter(shapes.values()))
    said = f"{type(goal).__name__} {goal.outputs} {goal.label_names} {getattr(goal, 'limits', '')} {shape}"
    own = [loss, *([type(goal)] if _is_own(type(goal)) else [])]
    source = hashlib.sha256((said + source_hash(*filter(None, own))).encode()).hexdigest()
    title = f"{type(goal).__name__.lower()} of this program's data"
    made = type("Given", (GivenTask,), {})
    made._goal, made._shape, made._sites, made.title = goal, shape, parts, title  # type: ignore[attr-defined]
    return _told(TASKS, made, f"own-data-{source[:8]}", source)


def _goal(kind: Any, every: Sequence[Dataset]) -> Goal:
    """Return the goal of a word, with the labels that occur."""
    if kind not in ("classification", "segmentation", "regression"):
        known = "'classification', 'segmentation', 'regression' or a Goal of medsilo.extend"
        raise MedsiloError(f"task: {kind!r} can't be learned of data that you give; choose {known}")
    targets = [data[case][1] for data in every for case in range(len(data))]  # type: ignore[arg-type]
    low, high = min(float(one.min()) for one in targets), max(float(one.max()) for one in targets)
    if kind == "regression" and low < high:
        return Regression((low, high))
    if low < 0 or high < 1 or high > 999 or any(one.is_floating_point() for one in targets):
        raise DataError(f"sites: labels are from {low:g} to {high:g}; give classes as whole numbers 0, 1, 2, ...")
    labels = tuple(map(str, range(int(high) + 1)))
    return Classification(labels) if kind == "classification" else goal_of(kind, labels[1:], "dice-ce", None)


# ---------------------------------------------------------------------------------------------------- cases
class _Read(Dataset):
    """A data set of the program's own, whose cases become tensors when they are read."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.patients = tuple(map(str, getattr(inner, "patients", range(len(inner)))))
        self.shape = np.shape(inner[0][0])

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, case: int) -> tuple[Tensor, Tensor]:
        values, target, *_ = self.inner[case]
        if np.shape(values) != self.shape:
            raise DataError(f"sites: a case has the shape {np.shape(values)}, the first {self.shape}; give all one shape")
        return torch.tensor(np.asarray(values), dtype=torch.float32), _target(target)


def _target(values: Any) -> Tensor:
    found = torch.tensor(np.asarray(values))
    return found.float() if found.is_floating_point() else found.long()


def _parts(given: Any, site: str) -> SiteData:
    """Return one site's data in three parts: as they are given, or with patients dealt in turn."""
    if isinstance(given, SiteData):
        return given
    try:
        if isinstance(given, Mapping) and set(given) == set(PARTS):
            return SiteData(*(_cases(given[part]) for part in PARTS))
        whole = _cases(given)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        forms = "a Dataset of (input, target), arrays (inputs, targets[, patients]), or a frame with a column 'label'"
        raise DataError(f"sites: the data of {site} can't be read ({error}); give {forms}") from error
    patients: Sequence[str] = whole.patients  # type: ignore[attr-defined]
    names = list(dict.fromkeys(patients))
    if len(names) < len(PARTS):
        raise DataError(f"sites: {site} has {len(names)} patients; give 3 or more, for training, validation and test")
    part = dict(zip(names, parts_in_turn(len(names)).tolist(), strict=True))
    labels = whole.targets if isinstance(whole, Cases) and whole.targets.ndim == 1 else None
    dealt = [[case for case, one in enumerate(patients) if part[one] == number] for number in range(len(PARTS))]
    return SiteData(*(Dealt(whole, places, patients, labels) for places in dealt))


def _cases(given: Any) -> Dataset:
    if hasattr(given, "columns"):
        inputs = given.drop(columns=[name for name in (LABEL, PATIENT) if name in given.columns])
        patients = given[PATIENT] if PATIENT in given.columns else range(len(given))
        given = inputs.to_numpy(np.float32), given[LABEL].to_numpy(), patients
    if not isinstance(given, tuple):
        return _Read(given)
    inputs, targets, *rest = given
    values = torch.tensor(np.asarray(inputs), dtype=torch.float32)
    found = _target(targets)
    found = found.long() if bool((found == found.round()).all()) else found
    return Cases(values, found, list(map(str, rest[0] if rest else range(len(values)))))
