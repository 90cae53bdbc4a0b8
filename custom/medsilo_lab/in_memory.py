"""Use the classes and the data of a Python program, such as a notebook, in a study. In a plan, a hash of the program's
source identifies its classes and data.

Classes of a program exist only in the program's own process, and no hospital accepts a plan that names such classes.
`python -m medsilo_lab.new` writes an installable package for a new class.
"""

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import numpy as np
import torch
from pydantic import create_model
from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.own_code import is_installed, own_line
from medsilo.models.network import Network
from medsilo.registry import METHODS, NETWORKS, TASKS, Registry
from medsilo.schedule.algorithm import Algorithm
from medsilo.tasks.classification import Classification
from medsilo.tasks.objective import Objective
from medsilo.tasks.own.folder import segmentation
from medsilo.tasks.regression import Regression
from medsilo.tasks.scored_together import ACCURACY, Classifying, ScoredTogether
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import Cases, CaseSubset, SiteData
from medsilo.tasks.splits import parts_in_turn
from medsilo.tasks.task import Task
from medsilo_lab.findings import Findings

LABEL, PATIENT = "label", "patient"  # columns of a data frame with a special meaning; all other columns are inputs
IMAGE = "image"
SIMPLE = (bool, int, float, str, bytes, tuple, type(None))
FINDINGS = "findings"
KINDS = ("classification", "segmentation", "regression", FINDINGS)
MOST_CLASSES = 1000
FORMS = (
    "a Dataset of (input, target) or of {'image': ..., 'label': ...}, arrays (inputs, targets[, patients]), a frame "
    "with a column 'label', or these as a dictionary of train, validation and test"
)
KNOWN = (Classification, Segmentation, Regression)
Kind = str | Objective | type[Task] | Task | Mapping[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------- the hash
def source_hash(*things: Any) -> str:
    """Return a SHA-256 hash of the source of classes and functions, and of all code of the program that this source
    uses.
    """
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
    """Return True if a class or function belongs to the user's program and not to an installed package."""
    if not (isinstance(thing, type) or inspect.isfunction(thing)):
        return False
    file = getattr(sys.modules.get(thing.__module__), "__file__", None)
    return bool(file and not is_installed(file)) or thing.__module__ == "__main__"


def state_hash(thing: Any) -> str:
    """Return a SHA-256 hash of an object's class and state, which is the same in every process.

    >>> state_hash(nn.CrossEntropyLoss()) == state_hash(nn.CrossEntropyLoss(label_smoothing=0.1))
    False
    """
    try:
        return hashlib.sha256(repr(_as_texts(thing, {})).encode()).hexdigest()
    except TypeError as error:
        told = f"medsilo cannot hash the contents of {type(thing).__name__} ({error})"
        raise MedsiloError(f"{told}; give a function, or a class that creates the object") from error


def _as_texts(thing: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Convert an object to nested tuples of texts, from which a hash is computed. `seen` contains each visited object
    by its address. While an object is in `seen`, Python cannot give its address to another object.
    """
    if isinstance(thing, SIMPLE) and not isinstance(thing, tuple):
        return repr(thing)
    if id(thing) in seen:
        return "again", seen[id(thing)][0]
    # Python may store equal tuples as one object or as several objects, and the hash must not depend on this choice
    if not isinstance(thing, tuple | frozenset):
        seen[id(thing)] = len(seen), thing
    if isinstance(thing, Tensor | np.ndarray):
        values = _tensor(thing)
        own = hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return str(values.dtype), tuple(values.shape), getattr(thing, "requires_grad", False), own
    if isinstance(thing, Mapping):
        return type(thing).__name__, *((_as_texts(key, seen), _as_texts(value, seen)) for key, value in thing.items())
    if isinstance(thing, list | tuple):
        return type(thing).__name__, *(_as_texts(one, seen) for one in thing)
    if isinstance(thing, set | frozenset):
        return type(thing).__name__, *sorted(repr(_as_texts(one, {})) for one in thing)
    if inspect.isfunction(thing) or isinstance(thing, type):
        cells = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        given = cells, getattr(thing, "__defaults__", None), getattr(thing, "__kwdefaults__", None)
        return (
            thing.__module__,
            thing.__qualname__,
            source_hash(thing) if _is_own(thing) else "",
            _as_texts(given, seen),
        )
    # the class of the object, and the arguments from which pickle would rebuild the object
    parts = thing.__reduce_ex__(4)
    return _as_texts(parts, seen) if isinstance(parts, tuple) else parts


# ---------------------------------------------------------------------------------------------------- sections
def method(method: str | Algorithm | type[Algorithm]) -> dict[str, Any]:
    """Return the plan's section for a method, which is given by its name or as a class of the program. A class is
    registered.
    """
    return _section(METHODS, method, Algorithm)


def model(network: Any) -> dict[str, Any]:
    """Return the plan's section for a network. The network is given by its name, as a module class, as a function that
    returns a module, or as a module with initial weights.
    """
    if isinstance(network, nn.Module):
        return _module(network)
    if not callable(network) or (isinstance(network, type) and issubclass(network, Network)):
        return _section(NETWORKS, network, Network)
    every = inspect.signature(network).parameters.values()
    needed = [
        one.name for one in every if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise MedsiloError(
            f"model: {network.__name__} takes {', '.join(needed)}; it must take the arguments channels and classes"
        )

    def build(self: Network, channels: int, classes: int) -> nn.Module:
        return network(channels, classes) if needed else network()

    return _network(network.__name__, build, source_hash(network))


def _module(given: nn.Module) -> dict[str, Any]:
    kept = deepcopy(given).cpu().train()  # a copy, so that later changes of the program's module have no effect

    def build(self: Network, channels: int, classes: int) -> nn.Module:
        if not torch.empty(0).is_meta:
            return deepcopy(kept)
        of = {id(one): nn.Parameter(one.to("meta"), one.requires_grad) for one in kept.parameters()}
        return deepcopy(kept, of | {id(one): one.to("meta") for one in kept.buffers()})

    return _network(type(given).__name__, build, state_hash(kept))


def _network(name: str, build: Callable[..., nn.Module], source: str) -> dict[str, Any]:
    name = f"{name.strip('<>').replace('_', '-').lower()}-{source[:8]}"
    return _registered(NETWORKS, type("Given", (Network,), {"build": build}), name, source)


def _section(table: Registry, given: Any, base: Any) -> dict[str, Any]:
    kind: Any = given if isinstance(given, type) else type(given)
    if isinstance(given, str):
        return {"name": given}
    if not issubclass(kind, base) or not isinstance(kind.model_fields["name"].default, str):
        raise MedsiloError(
            f"{kind.__name__} is no {base.__name__} with a name; derive it from {base.__name__}, and set its field name"
        )
    if table.get(name := kind.model_fields["name"].default) is not kind:
        table.give(kind, source_hash(kind))
    return {"name": name} if kind is given else given.model_dump(mode="json")


def _registered(table: Registry, base: Any, name: str, source: str) -> dict[str, Any]:
    own: dict[str, Any] = {"name": (Literal[name], name)}
    table.give(create_model(name, __base__=base, __module__=__name__, **own), source)
    return {"name": name}


class GivenTask(Classifying):
    """A task whose data are given by a Python program. Each call of `task` defines a subclass for one objective, one
    input shape and one set of sites.
    """

    @property
    def goal(self) -> Objective:
        goal: Objective = self._goal  # type: ignore[attr-defined]
        if self.score == ACCURACY or type(goal) is not Classification:
            return goal
        together = ScoredTogether(goal.label_names, goal.outputs, self.score)
        vars(together).update({**vars(goal), "metric": self.score})  # keeps a loss that the program has given
        return together

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


def task(kind: Kind | None, sites: Mapping[str, Any], loss: Loss | None = None, model: Any = None) -> dict[str, Any]:
    """Return the plan's section for a task whose data a program gives for each site.

    Args:
        kind: the kind of task, such as "classification"
        loss: a loss function that replaces the loss of the task
        model: the network; with one output per case, the task has two classes
    """
    if not sites:
        if loss is not None:
            raise MedsiloError("loss: this argument is only for your own data, given as sites={'a': ..., 'b': ...}")
        return dict(kind) if isinstance(kind, Mapping) else _section(TASKS, kind, Task)
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        remedy = f"; give {loss.__name__}(...)" if isinstance(loss, type) else ", such as torch.nn.CrossEntropyLoss()"
        raise MedsiloError(f"loss: {loss!r} can't be called with outputs and targets{remedy}")
    targets = _Targets(kind)
    parts = {site: _parts(own, site, targets) for site, own in sites.items()}
    every: list[Any] = [getattr(own, part) for own in parts.values() for part in PARTS]
    shapes = {tuple(data[0][0].shape) for data in every}
    if len(shapes) > 1 or () in shapes:
        raise DataError(f"sites: inputs have the shapes {sorted(shapes)}; give all inputs one shape, [channels, ...]")
    (shape,), goal = shapes, kind if isinstance(kind, Objective) else _goal(kind, every)
    if isinstance(goal, Classification) and goal.classes == 2 and _gives_one(model, shape):
        goal = Classification(goal.label_names, 1)
    if loss is not None:
        goal = copy(goal)
        vars(goal).update(
            loss=_OfABatch(loss, targets.axis), unbounded="a loss of your own has no known bound", cross_entropy=0.0
        )
    said = f"{type(goal).__name__} {goal.outputs} {goal.label_names} {getattr(goal, 'limits', '')} {shape}"
    source = source_hash(*filter(_is_own, [type(goal)])) + ("" if loss is None else state_hash(loss))
    source = hashlib.sha256((said + source).encode()).hexdigest()
    title = f"{type(goal).__name__.lower()} of this program's data"
    made = type("Given", (GivenTask,), {"title": title, "__annotations__": {}})
    for key, value in (("_goal", goal), ("_shape", shape), ("_sites", parts)):
        setattr(made, key, value)
    return _registered(TASKS, made, f"own-data-{source[:8]}", source)


def _gives_one(model: Any, shape: Sequence[int]) -> bool:
    """Return True if a module has one output per case. If calling the module raises an error, return False, because the
    error is reported when the module is built.
    """
    if not isinstance(model, nn.Module):
        return False
    try:
        with torch.no_grad():
            given = deepcopy(model).cpu().eval()(torch.zeros(2, *shape))
    except Exception:  # a module of the program may raise any error
        return False
    return isinstance(given, Tensor) and tuple(given.shape) == (2, 1)


class _OfABatch:
    """A loss function of the program. If the loss is not a mean over the batch, MedsiloError is raised.

    The loss function receives targets in the shape of the program's data: for example, for masks [1, H, W], a batch
    [batch, 1, H, W]. If the first call fails, the loss function is called with converted targets: as floats, or with
    one axis more or less. After a successful call, all later calls use the same conversion of the targets.
    """

    def __init__(self, loss: Loss, axis: bool) -> None:
        """axis: True if the program's targets have one axis more than the targets of the objective."""
        self.loss, self.axis, self.settled = deepcopy(loss) if isinstance(loss, nn.Module) else loss, axis, False
        self.floats = False
        self.name = getattr(loss, "__name__", type(loss).__name__)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.loss, nn.Module):
            self.loss.to(targets.device)
        settled = self.axis, self.floats
        mean = self._of(outputs, targets, *settled) if self.settled else self._first(outputs, targets)
        if not isinstance(mean, Tensor) or mean.ndim:
            given = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else repr(mean)
            raise DataError(f"loss: {self.name} gives {given}; return the batch's mean, a tensor without dimensions")
        return mean

    def _of(self, outputs: Tensor, targets: Tensor, axis: bool, floats: bool) -> Tensor:
        targets = targets.to(outputs.dtype) if floats else targets
        return self.loss(outputs, targets[:, None] if axis else targets)

    def _first(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Call the loss with several types and shapes of the targets until a call succeeds. A call also fails if torch
        warns about the shape of the targets.
        """
        first: Exception | None = None
        for floats, axis in product((False, True), (self.axis, not self.axis)):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "Using a target size")
                    mean = self._of(outputs, targets, axis, floats)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, IndexError, AssertionError, UserWarning) as error:
                first = first or error
            else:
                self.axis, self.floats, self.settled = axis, floats, True
                return mean
        shapes = f"targets of shape {list(targets.shape)} nor {[len(targets), 1, *targets.shape[1:]]}"
        assert first
        told = f"loss: {self.name} takes no {shapes}: {' '.join(str(first).split())[:200]}{own_line(first)}"
        raise DataError(f"{told}; wrap it in a function of (outputs, targets)") from first


def _goal(kind: Any, every: Sequence[Any]) -> Objective:
    """Return the objective for a kind of task; its labels are taken from the data. If no kind is given, the shape of
    the targets determines the objective.
    """
    if kind not in (None, *KINDS):
        told = f"task: {kind!r} needs no data of yours; choose of {', '.join(KINDS)}, survival, or give a Goal"
        raise MedsiloError(told)
    targets = [data[case][1] for data in every for case in range(len(data))]
    several = {tuple(target.shape) for target in targets}
    if kind == FINDINGS or (kind is None and all(len(own) == 1 and own[0] > 1 for own in several)):
        if len(several) > 1 or not all(
            one.ndim == 1 and torch.isin(one, torch.tensor([0, 1])).all() for one in targets
        ):
            raise DataError("sites: findings need the same number of 0/1 values for each case")
        return Findings([str(number) for number in range(len(targets[0]))])
    kind = kind or KINDS[0]
    low, high = min(float(one.min()) for one in targets), max(float(one.max()) for one in targets)
    if kind == "regression" and low < high:
        return Regression((low, high))
    if low < 0 or not 1 <= high < MOST_CLASSES or any(not one.equal(one.round()) for one in targets):
        raise DataError(f"sites: labels are from {low:g} to {high:g}; give classes as whole numbers 0, 1, 2, ...")
    labels = tuple(map(str, range(int(high) + 1)))
    return Classification(labels) if kind == KINDS[0] else segmentation(labels[1:])


# ---------------------------------------------------------------------------------------------------- cases
class _Targets:
    """Converts the program's targets to the targets that an objective needs. If the program's targets have one axis
    more than the objective's targets, `axis` is set to True.
    """

    def __init__(self, kind: Any) -> None:
        goal = isinstance(kind, Objective)
        self.known = isinstance(kind, KNOWN) if goal else True
        self.classes = self.known and not (isinstance(kind, Regression) if goal else kind == "regression")
        self.axis = False
        self.columns: list[Any] = []  # input columns of all data frames, in the order of the first data frame

    def of(self, values: Any, shape: Sequence[int], cases: int = 0) -> Tensor:
        """Convert the target of one case or, with `cases=1`, the targets of all cases. `shape` is the shape of the
        input of one case.

        >>> _Targets("segmentation").of([[1.0, 0.0]], (3, 2))
        tensor([1, 0])
        """
        found, grid = _target(values), tuple(shape[1:])
        own = tuple(found.shape[cases:])
        if self.known and own[:1] == (1,) and own[1:] in ((), grid) and own != grid:
            self.axis, found = True, found.squeeze(cases)
        whole = (self.classes or cases) and found.is_floating_point() and found.equal(found.round())
        return found.long() if whole else found


class _Read(Dataset):
    def __init__(self, inner: Any, targets: _Targets) -> None:
        self.inner, self.targets = inner, targets
        first = inner[0]
        self.shape = np.shape(_pair(first)[0])
        by_name = isinstance(first, Mapping) and PATIENT in first
        named = [inner[case][PATIENT] for case in range(len(inner))] if by_name else range(len(inner))
        self.patients = tuple(map(str, getattr(inner, "patients", named)))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, case: int) -> tuple[Tensor, Tensor]:
        values, target = _pair(self.inner[case])
        if np.shape(values) != self.shape:
            raise DataError(
                f"sites: case {case} has the shape {np.shape(values)}, case 0 {self.shape}; give all cases one shape"
            )
        return _tensor(values).float(), self.targets.of(target, self.shape)


def _pair(sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, Mapping):
        values, target, *_ = sample
        return values, target
    if absent := [key for key in (IMAGE, LABEL) if key not in sample]:
        raise ValueError(
            f"a sample has no {' and no '.join(absent)} but {', '.join(map(str, sample))}; rename its keys"
        )
    return sample[IMAGE], sample[LABEL]


def inputs_of(given: Any) -> Tensor:
    """Return the inputs of a Dataset or list; raise MedsiloError if `medsilo.run` does not accept the format of the
    samples.
    """
    try:
        cases = [given[number] for number in range(len(given))]
        return torch.stack([_tensor(_pair(case)[0]) for case in cases])
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise MedsiloError(
            "images: give an array of cases, or a Dataset of (input, target) with inputs of one shape. For files, also "
            "give the argument out, the folder for the results",
            private=str(error),
        ) from error


def with_patients(given: Any, patients: Any, site: str) -> Any:
    """Add the patient of each case to the data of a site, which are arrays (inputs, targets) or a Dataset."""
    if isinstance(given, tuple) and len(given) == 2 and len(patients) == len(given[1]):
        return (*given, patients)
    if isinstance(given, Dataset) and len(patients) == len(given):  # type: ignore[arg-type]
        pairs = [_pair(given[number]) for number in range(len(patients))]
        inputs, targets = (torch.stack([_tensor(one) for one in part]) for part in zip(*pairs, strict=True))
        return inputs, targets, patients
    raise DataError(
        f"groups of {site}: give one patient for each case of arrays (inputs, targets) or of a Dataset; a frame has a "
        f"column {PATIENT!r}"
    )


def _tensor(values: Any) -> Tensor:
    """Copy values to a plain CPU tensor, without the metadata of a MONAI tensor."""
    if isinstance(values, Tensor):
        return values.detach().cpu().as_subclass(Tensor).clone()
    return torch.tensor(np.asarray(values))


def _target(values: Any) -> Tensor:
    found = values if isinstance(values, Tensor) else np.asarray(values)
    if not isinstance(found, Tensor) and found.dtype.kind not in "biuf":
        raise DataError("sites: targets must be numbers; give classes as 0, 1, 2, ...")
    found = _tensor(found)
    return found.float() if found.is_floating_point() else found.long()


def _parts(given: Any, site: str, targets: _Targets) -> SiteData:
    if isinstance(given, SiteData):
        return given
    try:
        if isinstance(given, Mapping):
            return SiteData(*(_cases(given[part], targets) for part in PARTS))
        whole: Any = _cases(given, targets)
    except (TypeError, ValueError, KeyError, IndexError, AssertionError) as error:
        told = f"sites: the data of {site} can't be read: {type(error).__name__}: {error}{own_line(error)}"
        raise DataError(f"{told}; give {FORMS}") from error
    if isinstance(whole, Cases) and not whole.inputs.isfinite().all():
        raise DataError(f"sites: inputs of {site} are NaN or infinite; leave these cases out, or fill them in")
    names = list(dict.fromkeys(whole.patients))
    if len(names) < len(PARTS):
        raise DataError(f"sites: {site} has {len(names)} patients; give 3 or more, for training, validation and test")
    part = dict(zip(names, parts_in_turn(len(names)).tolist(), strict=True))
    labels = whole.targets if isinstance(whole, Cases) and whole.targets.ndim == 1 else None
    parts = np.array([part[patient] for patient in whole.patients])
    return SiteData.in_parts(parts, lambda places: CaseSubset(whole, places.tolist(), whole.patients, labels))


def _cases(given: Any, targets: _Targets) -> Dataset:
    if hasattr(given, "columns"):
        inputs = given.drop(columns=[name for name in (LABEL, PATIENT) if name in given.columns])
        targets.columns = targets.columns or [*inputs.columns]
        if other := {*inputs.columns} ^ {*targets.columns}:
            raise ValueError(f"column {min(map(str, other))!r} is not in all frames")
        patients = [given[PATIENT]] if PATIENT in given.columns else []
        given = (inputs[targets.columns].to_numpy(np.float32), given[LABEL].to_numpy(), *patients)
    if not isinstance(given, tuple):
        return _Read(given, targets)
    inputs, labels, *patients = given
    values = _tensor(inputs).float()
    return Cases(
        values, targets.of(labels, values.shape[1:], 1), list(map(str, patients[0] if patients else range(len(values))))
    )
