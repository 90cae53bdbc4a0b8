"""Survey the counts, ranges and problems of a site's data."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from medsilo.core.errors import DataError, UnfitData
from medsilo.tasks.shares import PARTS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.task import Task

Range = tuple[float, float]  # least and greatest value
Severity = Literal["stops", "left out", "note"]


@dataclass(frozen=True)
class Problem:
    """A problem of a site's data, and the number of affected cases.

    The description `what` states the problem and, after "; ", the remedy. It names no file and no patient, and contains
    no number of cases or patients. This number is only in `count`, which `medsilo check` suppresses if it is small. The
    texts in `private` may name files or patients, so they must not leave the hospital.

    The severity is "stops" if training rejects the data, "left out" if training leaves out the affected cases, and
    "note" if all cases are used.
    """

    severity: Severity
    what: str
    count: int = 0  # number of files, cases or patients that the problem affects
    private: tuple[str, ...] = ()

    @property
    def counted(self) -> str:
        """The description with the exact count, for persons who may see the data."""
        return self.told(str)

    def told(self, shown: Callable[[int], object]) -> str:
        """Return the description with the count.

        Args:
            shown: converts the count to the text or number that a reader of the description may see
        """
        what, semicolon, remedy = self.what.partition("; ")
        return f"{what} ({shown(self.count)}){semicolon}{remedy}" if self.count else self.what


def refuse_what_stops(problems: Sequence[Problem]) -> None:
    if wrong := [problem for problem in problems if problem.severity == "stops"]:
        # a part may be empty because its cases were left out, so name the reasons
        if any("no cases" in problem.what for problem in wrong):
            wrong += [problem for problem in problems if problem.severity == "left out"]
        private = "; ".join(name for problem in wrong for name in problem.private)
        raise UnfitData("; ".join(problem.counted for problem in wrong), private)


@dataclass(frozen=True)
class PartFacts:
    """Counts of a site's training, validation or test part, including the number of cases with each class or
    structure.
    """

    cases: int
    patients: int
    classes: dict[str, int]


@dataclass(frozen=True)
class Survey:
    """Counts, ranges and problems of a site's data; a field is empty if it does not apply to the task."""

    parts: dict[str, PartFacts]  # counts of the training, validation and test part
    # number of cases with each label value in the site's files
    label_values: dict[str, int] = field(default_factory=dict)
    size: tuple[Range, ...] | None = None  # range of the number of voxels in the files along x, y (and z)
    spacing: tuple[Range, ...] | None = None  # range of the voxel spacing in millimetres along x, y (and z)
    intensity: Range | None = None
    seconds: Range | None = None  # range of the recordings' lengths in seconds
    problems: tuple[Problem, ...] = ()
    fixed: bool = False  # True if a table assigns cases to training, validation or test
    # False if each case counts as a separate patient, because the data name no patients
    patients_named: bool = True
    # for each DICOM element that identifies patients, the number of series that contain it
    identifiers: dict[str, int] = field(default_factory=dict)
    # mean and standard deviation with which training standardises each input
    scales: dict[str, Range] = field(default_factory=dict)
    absent: tuple[str, ...] = ()  # the plan's structures and columns that the site's data lack

    @property
    def usable(self) -> bool:
        return not any(problem.severity == "stops" for problem in self.problems)

    @classmethod
    def stopped(cls, reason: str, private: str = "") -> Self:
        """Create a survey of data that could not be read, with the reason as the only problem."""
        return cls({}, problems=(Problem("stops", reason, private=(private,) if private else ()),))


def range_of(values: Iterable[float]) -> Range | None:
    known = list(values)
    return (float(min(known)), float(max(known))) if known else None


def ranges_of(several: Iterable[Sequence[float]]) -> tuple[Range, ...] | None:
    """Return the range along each axis; None if images differ in their number of axes."""
    known = list(several)
    if not known or len({len(values) for values in known}) > 1:
        return None
    return tuple((float(min(axis)), float(max(axis))) for axis in zip(*known, strict=True))


def digest(values: "Tensor") -> str:
    return hashlib.sha256(repr(tuple(values.shape)).encode() + values.contiguous().numpy().tobytes()).hexdigest()


def repeated(digests: Iterable[str]) -> int:
    """Count the images that are copies of earlier images, by their hashes."""
    return sum(count - 1 for count in Counter(digests).values())


def in_two_parts(patients: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the patients who have cases in more than one part (training, validation, test)."""
    places = Counter(patient for part in patients.values() for patient in set(part))
    return {patient for patient, count in places.items() if count > 1}


def survey_of(task: "Task", read: "Callable[[], SiteData]") -> Survey:
    """Survey a task's data, reading it as training does."""
    try:
        data = read()
    except DataError as error:
        return Survey.stopped(str(error), error.private)
    return surveyed({part: getattr(data, part) for part in PARTS}, task.mixes_patients)


def surveyed(parts: "dict[str, Dataset]", mixes_patients: bool = False) -> Survey:
    """Survey the parts of a site's data by reading every case once."""
    import torch

    from medsilo.tasks.site_data import patients_of

    found, digests, shapes, lows, highs, broken = {}, [], [], [], [], 0
    unreadable: dict[str, list[str]] = {}  # for each reason, the files that could not be read
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
