"""The survey of a site's data: counts and ranges, and nothing that names a patient or a file."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch.utils.data import Dataset

from medsilo.core.errors import DataError, Unfit
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import SiteData, patients_of

if TYPE_CHECKING:
    from torch import Tensor

    from medsilo.tasks.task import Task

Range = tuple[float, float]  # the least and the greatest
Severity = Literal["stops", "left out", "note"]


@dataclass(frozen=True)
class Problem:
    """One kind of problem. `what` says what is wrong and what to do, and is safe to show anywhere.

    stops: training refuses these data. left out: training refuses these cases and goes on with the others. note: it
    goes on with all. `private` names the files or patients, for the hospital's own eyes.
    """

    severity: Severity
    what: str
    count: int = 0  # how many files, cases or patients have it; 0: it is none of theirs
    private: tuple[str, ...] = ()

    @property
    def counted(self) -> str:
        """Return what is wrong, and at how many."""
        what, semicolon, remedy = self.what.partition("; ")
        return f"{what} ({self.count}){semicolon}{remedy}" if self.count else self.what


def refuse_what_stops(problems: Sequence[Problem]) -> None:
    """Raise Unfit where something stands against all cases."""
    if wrong := [problem for problem in problems if problem.severity == "stops"]:
        if any("no cases" in problem.what for problem in wrong):  # then those that were left out may be why
            wrong += [problem for problem in problems if problem.severity == "left out"]
        private = "; ".join(name for problem in wrong for name in problem.private)
        raise Unfit("; ".join(problem.counted for problem in wrong), private)


@dataclass(frozen=True)
class PartFacts:
    """One part of a site's data. `classes`: the cases of each class, or those that show each structure."""

    cases: int
    patients: int
    classes: dict[str, int]


@dataclass(frozen=True)
class Survey:
    """A site's data in counts. What a task can't tell is None or empty."""

    parts: dict[str, PartFacts]  # of train, validation and test
    label_values: dict[str, int] = field(default_factory=dict)  # value in the site's files -> cases that have it
    size: tuple[Range, ...] | None = None  # voxels along x, y (and z), as the files have them
    spacing: tuple[Range, ...] | None = None  # millimetres along x, y (and z)
    intensity: Range | None = None
    seconds: Range | None = None  # of recordings
    problems: tuple[Problem, ...] = ()
    fixed: bool = False  # whether a table says who is in which part
    patients_named: bool = True  # whether the data or the settings say whose a case is; else each counts as one
    identifiers: dict[str, int] = field(default_factory=dict)  # DICOM elements that tell who it is -> series with them
    # What a table's or recordings' numbers were standardised with
    scales: dict[str, Range] = field(default_factory=dict)
    absent: tuple[str, ...] = ()  # the plan's structures and columns that are not here

    @property
    def usable(self) -> bool:
        """Return whether training would begin with these data."""
        return not any(problem.severity == "stops" for problem in self.problems)

    @classmethod
    def stopped(cls, what: str, private: str = "") -> Self:
        """Nothing could be read, for one reason."""
        return cls({}, problems=(Problem("stops", what, private=(private,) if private else ()),))


def range_of(values: Iterable[float]) -> Range | None:
    """The least and the greatest; None of nothing."""
    known = list(values)
    return (float(min(known)), float(max(known))) if known else None


def ranges_of(several: Iterable[Sequence[float]]) -> tuple[Range, ...] | None:
    """The ranges along each axis, over images with equally many axes; None where these differ."""
    known = list(several)
    if not known or len({len(values) for values in known}) > 1:
        return None
    return tuple((float(min(axis)), float(max(axis))) for axis in zip(*known, strict=True))


def digest(values: "Tensor") -> str:
    """Return what only equal images have in common."""
    return hashlib.sha256(repr(tuple(values.shape)).encode() + values.contiguous().numpy().tobytes()).hexdigest()


def repeated(digests: Iterable[str]) -> int:
    """Return how many are there again."""
    return sum(count - 1 for count in Counter(digests).values())


def in_two_parts(patients: Mapping[str, Iterable[str]]) -> set[str]:
    """The patients that more than one part has."""
    places = Counter(patient for part in patients.values() for patient in set(part))
    return {patient for patient, count in places.items() if count > 1}


def survey_of(task: "Task", read: Callable[[], SiteData]) -> Survey:
    """Return what is found when a task's data are read as training reads them."""
    try:
        data = read()
    except DataError as error:
        return Survey.stopped(str(error), error.private)
    return surveyed({part: getattr(data, part) for part in PARTS}, task.mixes_patients)


def surveyed(parts: dict[str, Dataset], mixes_patients: bool = False) -> Survey:
    """Return what can be told of any data set: by looking at every case once."""
    found, digests, shapes, lows, highs, broken = {}, [], [], [], [], 0
    unreadable: dict[str, list[str]] = {}  # why -> files
    values: Counter[int] = Counter()
    for name, data in parts.items():
        classes: Counter[int] = Counter()
        for number in range(len(data)):  # type: ignore[arg-type]
            try:
                inputs, target = data[number]
            except DataError as error:
                unreadable.setdefault(str(error), []).append(error.private)
                continue
            digests.append(digest(inputs))
            shapes.append(inputs.shape[:0:-1])
            low, high = torch.aminmax(inputs)
            broken += not (low.isfinite() and high.isfinite())
            lows.append(float(low))
            highs.append(float(high))
            classes.update(target.long().unique().tolist())
        values += classes
        told = {str(label): classes[label] for label in sorted(classes)}
        found[name] = PartFacts(len(data), len(set(patients_of(data))), told)  # type: ignore[arg-type]
    shared = in_two_parts({name: patients_of(data) for name, data in parts.items()})
    problems = [
        Problem("stops", f"the {name} part has no cases; check its split")
        for name, part in found.items()
        if not part.cases
    ]
    problems += [Problem("stops", why, len(files), tuple(files)) for why, files in unreadable.items()]
    if broken:
        problems.append(Problem("stops", "cases have values that are NaN or infinite; correct or remove them", broken))
    if shared:
        what = "patients are in two parts, so that the test would be of known patients; "
        what += "this task or its split has it so" if mixes_patients else "give each one part"
        severity: Severity = "note" if mixes_patients else "stops"
        problems.append(Problem(severity, what, len(shared), tuple(sorted(shared))))
    if twice := repeated(digests):
        problems.append(Problem("note", "images are there twice; remove the copies", twice))
    intensity = None if broken or not lows else (min(lows), max(highs))
    return Survey(
        found,
        {str(label): values[label] for label in sorted(values)},
        size=ranges_of(shapes),
        intensity=intensity,
        problems=tuple(problems),
    )
