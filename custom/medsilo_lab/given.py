"""Convert the data of a Python program to the data of a study's hospitals. The program's data are a data frame, arrays,
a Dataset, or a folder.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from medsilo.core.errors import DataError
from medsilo.core.files import write_text
from medsilo.core.yaml_text import dump_yaml
from medsilo.plan import Plan
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import ALL_MINE, SiteSettings, read_settings_of_all
from medsilo.tasks.classification import Classification
from medsilo.tasks.objective import Objective
from medsilo.tasks.regression import Regression
from medsilo.tasks.shares import PARTS
from medsilo.tasks.survival import Survival
from medsilo_lab.findings import Findings

FORMS = (
    "a frame, arrays (inputs, targets), a Dataset of (input, target), one of these for each hospital by its name, or a "
    "folder or table's file"
)
SEVERAL = (
    "data: several labels of a case are learned together where each is 1, which the case has, or 0. Of a survival give "
    "two columns: the time, and 1 where the event came"
)
KINDS: Mapping[str, type[Objective]] = {
    "classification": Classification,
    "regression": Regression,
    "findings": Findings,
    "survival": Survival,
}
SEVERAL_KINDS = ("findings", "survival")  # kinds of tasks that have several targets per case
DATA_SET = "data-set"
PATIENT = "patient"
ALONE = "site"  # name of the single site if the program names no hospital
MOST_CLASSES = 254
# a target with at least this number of different whole numbers counts as a quantity and not as a class
FEWEST_NUMBERS = 20


class GivenSites(dict[str, Any]):
    """A dictionary of the hospitals' data for the argument `sites` of `run` and `compare`; each key is a hospital's
    name. The attribute `goal` is the objective of all hospitals.
    """

    def __init__(self, sites: Mapping[str, Any], objective: Objective | None) -> None:
        super().__init__(sites)
        self.goal = objective

    def __repr__(self) -> str:
        def cases(parts: Any) -> int:
            if isinstance(parts, Mapping):
                return sum(map(cases, parts.values()))
            return len(parts[0] if isinstance(parts, tuple) else parts)

        names = ", ".join(f"{name}: {cases(own)}" for name, own in self.items())
        return f"<data of {len(self)} hospitals, cases of each: {names}>"


class GivenFolder(GivenSites):
    """The data sets that `medsilo data` would make from a folder of several hospitals, and the proposed plan."""

    def __init__(self, plan: Plan, temporary: TemporaryDirectory, patients: Mapping[str, int]) -> None:
        """Create the data of hospitals from the proposed plan.

        Args:
            temporary: The temporary folder that contains the medsilo.yaml of each hospital.
        """
        super().__init__(dict.fromkeys(plan.participation.everyone), None)
        self.plan, self._kept, self.patients = plan, temporary, patients

    def __repr__(self) -> str:
        names = ", ".join(f"{name}: {count}" for name, count in self.patients.items())
        return f"<data of {len(self)} hospitals, patients of each: {names}>"

    def of(self, plan: Plan | None) -> Plan:
        """Return the given plan with the hospitals in the folder as its sites. Without a given plan, return the
        proposed plan.
        """
        names = self.plan.participation
        told = [f"participation.sites={json.dumps([*names.sites])}"]
        told += [f"participation.evaluation_sites={json.dumps([*names.evaluation_sites])}"]
        return self.plan if plan is None else plan.with_changes(told)

    def settings(self, device: str) -> SiteSettings:
        return read_settings_of_all(Path(self._kept.name)).changed({**ALL_MINE, "device": device}, "medsilo.data")


@dataclass(frozen=True)
class _Read:
    """Cases as arrays: input, target, patient and hospital of each case."""

    inputs: np.ndarray
    targets: np.ndarray
    labels: tuple[str, ...] = ()
    patients: Any = None
    hospitals: Any = None
    columns: tuple[Any, ...] = ()  # input columns in the order of the data frame, if the data are a data frame

    def __post_init__(self) -> None:
        count = len(self.inputs)
        for name, own in (("targets", self.targets), ("patient", self.patients), ("hospital", self.hospitals)):
            if own is not None and len(own) != count:
                raise DataError(f"data: {name} has {len(own)} values for {count} cases; give one for each case")

    @property
    def names(self) -> list[str]:
        return [str(own) for own in (range(len(self.inputs)) if self.patients is None else self.patients)]


def data(
    given: Any,
    *,
    patient: Any = None,
    hospital: Any = None,
    target: Any = "label",
    answers: Mapping[str, str] | None = None,
    called: Mapping[str, str] | None = None,
) -> GivenSites:
    """Convert the data of a Python program to a dictionary from hospitals to data, for the argument `sites` of `run`
    and `compare`.

    Args:
        given: a pandas data frame, arrays (inputs, targets), a Dataset of (input, target), or a dictionary of these by
            hospital. Or the path of a folder or a table, from which a data set and a plan are made as by `medsilo data`
        patient: the column of the data frame with the patient of each case, or a sequence of patients; by default the
            column "patient". False: each case is a separate patient
        hospital: the column with the hospital of each case, or a sequence of hospitals; None: all cases are from one
            hospital
        target: the column with the outcome, as strings or numbers; or several 0/1 columns, one per finding; or two
            columns, the time and whether the event occurred
        answers: for a folder, answers to the questions about ambiguous names and values, by the questions' keys
        called: for a folder, the names in plans of its columns, levels and classes, by their names in the folder

    >>> own = data(([[1.0], [2.0], [3.0]], ["ill", "well", "ill"]), hospital=["a", "b", "a"])
    >>> own, own.goal.label_names, own["a"][1].tolist()
    (<data of 2 hospitals, cases of each: a: 2, b: 1>, ('ill', 'well'), [0, 0])
    """
    if isinstance(given, str | Path):
        learned = None if target == "label" else target
        return _of_folder(Path(given), patient, hospital, learned, answers or {}, called or {})
    if answers or called:
        raise DataError(
            "data: use the arguments answers and called only for a folder; here use patient, hospital and target"
        )
    if isinstance(given, Mapping):
        return _of_each(given, patient, hospital, target)
    if not is_arrays(given):
        if isinstance(given, Dataset) or (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
            return _of_dataset(given, hospital)
        raise DataError(f"data: {type(given).__name__} can't be read; give {FORMS}")
    own = _read(given, patient, hospital, target)
    learned, goal = _learned(own.targets, own.labels)
    names = np.asarray(own.names)
    of = np.asarray([str(one) for one in ([ALONE] * len(names) if own.hospitals is None else own.hospitals)])
    sites = {str(one): (own.inputs[of == one], learned[of == one], names[of == one].tolist()) for one in np.unique(of)}
    return GivenSites(sites, goal)


def as_given(sites: Mapping[str, Any], task: Any) -> tuple[Mapping[str, Any], Any]:
    """If labels are strings, or if cases have several labels, convert the data of the hospitals with the function
    `data`. Data with numbers as labels, and one label per case, are returned unchanged.

    task: The argument `task` that the program gave.
    """
    if not isinstance(sites, GivenSites):
        pieces = [one for site in sites.values() for one in _by_part(site).values()]
        if not all(map(is_arrays, pieces)) or not (
            task in SEVERAL_KINDS or any(_says_more(piece, task) for piece in pieces)
        ):
            return sites, task
        sites = data(sites)
    kind = KINDS.get(task) if isinstance(task, str) else None
    if task in SEVERAL_KINDS and not isinstance(sites.goal, KINDS[task]):
        raise DataError(SEVERAL)
    known = task is None or (kind is not None and isinstance(sites.goal, kind))
    return sites, sites.goal if known else task


def _says_more(given: Any, task: Any) -> bool:
    """Return True if labels are strings, or if there are several labels per case. For masks, the result is True only if
    the program names the labels.
    """
    if hasattr(given, "columns") and "label" not in given.columns:
        return False
    labels = np.asarray(given["label"] if hasattr(given, "columns") else given[1])
    if task not in (None, "classification"):
        return False
    return labels.dtype.kind not in "biuf" or (task is None and labels.ndim == 2 and labels.shape[1] > 1)


def is_arrays(given: Any) -> bool:
    """Return True for a data frame, and for a pair of arrays (inputs, targets)."""
    return hasattr(given, "columns") or (isinstance(given, tuple) and len(given) in (2, 3))


def _of_each(parts: Mapping[Any, Any], patient: Any, hospital: Any, target: Any) -> GivenSites:
    if hospital is not None:
        raise DataError("data: the keys name the hospitals; leave out the argument hospital")
    if not (patient is None or patient is False or isinstance(patient, str)):
        raise DataError(
            "data: for several hospitals, give arrays (inputs, targets, patients), or the name of a column as patient"
        )
    whole = {str(site): own for site, own in ({ALONE: parts} if {*parts} == {*PARTS} else parts).items()}
    pieces = {(site, part): one for site, own in whole.items() for part, one in _by_part(own).items()}
    if not all(map(is_arrays, pieces.values())):
        return GivenSites(whole, None)
    read: dict[tuple[str, str], _Read] = {}
    columns: tuple[Any, ...] = ()
    for place, piece in pieces.items():
        read[place] = _read(piece, patient, None, target, columns)
        columns = columns or read[place].columns
    learned, goal = _learned(np.concatenate([own.targets for own in read.values()]), next(iter(read.values())).labels)
    ends = np.cumsum([len(own.targets) for own in read.values()])[:-1]
    sites: dict[str, Any] = {}
    for ((site, part), own), targets in zip(read.items(), np.split(learned, ends), strict=True):
        cases = (own.inputs, targets, own.names)
        sites[site] = {**sites.get(site, {}), part: cases} if part else cases
    return GivenSites(sites, goal)


def _by_part(parts: Any) -> Mapping[str, Any]:
    """Return the training, validation and test data of a hospital as a dictionary. If the data are not divided, the
    dictionary has the single key "".
    """
    return parts if isinstance(parts, Mapping) else {"": parts}


def _read(given: Any, patient: Any, hospital: Any, target: Any, columns: Sequence[Any] = ()) -> _Read:
    """Convert a data frame or arrays to the arrays of all cases. `columns` are the input columns in the order of the
    first hospital's data frame.
    """
    if hasattr(given, "columns"):
        return _of_frame(given, patient, hospital, target, columns)
    patients = given[2] if len(given) > 2 and patient is None else None if patient is False else patient
    if isinstance(patients, str):
        raise DataError(f"data: arrays have no column {patients!r}; give the patient of each case")
    try:
        inputs = np.asarray(given[0], np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(
            "data: inputs must be numbers of the same shape; convert words with: pandas.get_dummies"
        ) from error
    return _Read(inputs, np.asarray(given[1]), tuple(map(str, getattr(given[1], "columns", ()))), patients, hospital)


def _of_frame(frame: Any, patient: Any, hospital: Any, target: Any, columns: Sequence[Any]) -> _Read:
    learned = [target] if isinstance(target, str) else list(target)
    if patient is None:
        patient = _patients_column([name for name in frame.columns if name not in (*learned, hospital)])
    named = [own for own in (patient, hospital) if isinstance(own, str)]
    if absent := [name for name in (*learned, *named) if name not in frame.columns]:
        raise DataError(f"data: the frame has no column {absent[0]!r}; it has {', '.join(map(str, frame.columns))}")
    inputs = frame.drop(columns=[*learned, *named])
    if columns and (other := {*inputs.columns} ^ {*columns}):
        raise DataError(f"data: column {min(map(str, other))!r} is not in all frames; give all the same columns")
    if words := [str(name) for name in inputs if inputs[name].dtype.kind not in "biuf"]:
        raise DataError(f"data: column {words[0]!r} is not numeric; leave it out, or convert it: pandas.get_dummies")
    if empty := [str(name) for name in (*inputs, *learned, *named) if frame[name].isna().any()]:
        raise DataError(
            f"data: column {empty[0]!r} has missing values; fill them in, or leave out the lines without a value"
        )
    patients, hospitals = (
        frame[own].to_numpy() if isinstance(own, str) else own
        for own in (None if patient is False else patient, hospital)
    )
    targets = frame[learned[0]].to_numpy() if len(learned) == 1 else frame[learned].to_numpy()
    order = tuple(columns or inputs.columns)
    labels = tuple(map(str, learned)) if len(learned) > 1 else ()
    return _Read(inputs[list(order)].to_numpy(np.float32), targets, labels, patients, hospitals, order)


def _patients_column(names: Sequence[Any]) -> str | None:
    """Return "patient" if a column has this name, otherwise None. Raise DataError if a column with a different name
    seems to name the patients.
    """
    from medsilo_lab.start.table_folder import SURE, plain_name

    if PATIENT in names:
        return PATIENT
    if looks := [name for name in map(str, names) if plain_name(name) in SURE]:
        raise DataError(
            f"data: does column {looks[0]!r} name the patient? Say patient={looks[0]!r}, or patient=False if each line "
            "is a different patient"
        )
    return None


def _learned(targets: np.ndarray, labels: Sequence[str] = ()) -> tuple[np.ndarray, Objective | None]:
    """Convert targets to numbers, and return the numbers together with the objective that the targets imply. If the
    targets do not imply an objective, return None as the objective.

    labels: Names of the targets, if each case has several targets.
    """
    if targets.dtype.names:
        labels, targets = (
            targets.dtype.names,
            np.stack([targets[name].astype(float) for name in targets.dtype.names], 1),
        )
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.ndim == 2:
        return _of_several(targets, labels or [str(number) for number in range(targets.shape[1])])
    if targets.ndim > 2:
        return targets, None
    if targets.dtype.kind not in "iuf":
        names = sorted({str(own) for own in targets.tolist()})
        if len(names) == 1:
            raise DataError(f"data: all labels are {names[0]!r}, so there is nothing to learn")
        if len(names) > MOST_CLASSES:
            raise DataError(f"data: there are {len(names)} different labels; give {MOST_CLASSES} at most")
        place = {name: number for number, name in enumerate(names)}
        return np.array([place[str(own)] for own in targets.tolist()]), Classification(tuple(names))
    numbers = targets.astype(float)
    if not np.isfinite(numbers).all():
        raise DataError("data: targets are missing or infinite; fill them in, or leave these cases out")
    if (numbers != np.round(numbers)).any() or len(np.unique(numbers)) >= FEWEST_NUMBERS or numbers.min() < 0:
        if numbers.min() == numbers.max():
            raise DataError(f"data: all targets are {numbers.min():g}, so there is nothing to learn")
        return targets.astype(np.float32), Regression((float(numbers.min()), float(numbers.max())))
    if numbers.min() > 0:  # the classes are numbered from 1, so there is no class 0
        codes, places = np.unique(targets.astype(np.int64), return_inverse=True)
        return places, Classification([str(code) for code in codes]) if len(codes) > 1 else None
    return targets.astype(np.int64), None


def _of_several(targets: np.ndarray, labels: Sequence[str]) -> tuple[np.ndarray, Objective]:
    try:
        own = targets.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(SEVERAL) from error
    if not np.isfinite(own).all():
        raise DataError("data: targets are missing or infinite; fill them in, or leave these cases out")
    binary = [bool(np.isin(column, (0, 1)).all()) for column in own.T]
    if all(binary):
        if len({*labels}) < len(labels):
            raise DataError("data: two labels of a case have the same name; rename one of them")
        return own, Findings(labels)
    if len(labels) != 2 or not any(binary):
        raise DataError(SEVERAL)
    # survival targets are (time, event), so the columns are exchanged if the first column contains the events
    own = own if binary[1] else own[:, ::-1].copy()
    if (own[:, 0] < 0).any():
        raise DataError("data: times must be non-negative numbers; correct them")
    return own, Survival()


def _of_dataset(given: Any, hospital: Sequence[Any] | None) -> GivenSites:
    """Divide the cases of a Dataset by hospital. Each sample of the Dataset must contain the name of the patient."""
    if hospital is None:
        return GivenSites({ALONE: given}, None)
    if len(hospital) != len(given):
        raise DataError(f"data: hospital has {len(hospital)} values for {len(given)} cases; give one for each case")
    places: dict[str, list[int]] = {}
    for place, own in enumerate(hospital):
        places.setdefault(str(own), []).append(place)
    return GivenSites({name: Subset(given, own) for name, own in sorted(places.items())}, None)


def _of_folder(
    folder: Path,
    patient: str | None,
    hospital: str | None,
    target: Any,
    answers: Mapping[str, str],
    called: Mapping[str, str],
) -> GivenFolder:
    """Make the data sets of a folder; raise MedsiloError with the first question that has no answer."""
    from medsilo_lab.start.dataset_layout import DatasetLayout
    from medsilo_lab.start.making import make_each
    from medsilo_lab.start.questions import Question

    def ask(question: Question) -> str:
        if question.safe:
            return question.proposed
        known = " or ".join(repr(answer) for answer in question.answers)
        raise DataError(f"data: {question.text}; give answers={{{question.key!r}: ...}} with {known}")

    if not folder.exists():
        raise DataError("data: the folder or file does not exist; correct its path", str(folder))
    said: dict[str, Any] = {"site": hospital} if hospital else {}
    if isinstance(target, Sequence) and not isinstance(target, str):
        said, target = {**said, "survival": [*target]}, None
    whose = {"patients": patient} if patient else {}
    layout = DatasetLayout(folder.resolve(), ALONE, target=target, said=said)
    made = make_each(layout, ask, said={**whose, **answers}, called=called)
    kept = TemporaryDirectory(prefix="medsilo-")
    for site, own in made.sets.items():
        place = Path(kept.name) / site
        own.write(place / DATA_SET)
        write_text(place / FILE_NAME, dump_yaml({"data": str(place / DATA_SET)}))
    if "" not in made.sets:
        write_text(Path(kept.name) / FILE_NAME, "{}\n")
    alone = {own.data_set.name: own.data_set.patients.count for own in made.sets.values()}
    return GivenFolder(made.plan, kept, made.sight.patients if made.sight.several else alone)
