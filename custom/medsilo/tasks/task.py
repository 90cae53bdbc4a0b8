"""The base of tasks: where cases come from, what is learned, what becomes of new cases. No federation is known here."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from medsilo.core.errors import DataError, Refused
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.learning.compute import Case
from medsilo.learning.drawn import Draw, DrawnCases
from medsilo.learning.partial_labels import labels_in
from medsilo.learning.seeds import seed_for
from medsilo.models.network import Network
from medsilo.tasks import splits
from medsilo.tasks.inference import Inference
from medsilo.tasks.lazy_cases import LazyCases, Memory
from medsilo.tasks.objective import Objective
from medsilo.tasks.sources import DataSource, links_out
from medsilo.tasks.survey import (
    PARTS,
    PartFacts,
    Problem,
    Severity,
    Survey,
    digest,
    in_two_parts,
    ranges_of,
    repeated,
)


class Fold(Section):
    """One of several equal parts of a site's patients, which is tested. The next part validates."""

    number: int = Field(ge=1, le=100, description="which of them is tested")
    of: int = Field(ge=3, le=100, description="how many there are: each patient is tested in one of them")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Fold":
        if self.number > self.of:
            raise ValueError(f"fold {self.number} of {self.of}: there are only {self.of}")
        return self

    def parts(self, patients: Sequence[str], split: int) -> list[list[int]]:
        """Return the places of the cases in training, validation and test.

        A site's patients are dealt in turn, in an order that follows from their names and the site's own number alone:
        neither the study's seed nor another site moves anybody.
        """
        names = sorted(set(patients), key=lambda patient: (seed_for(split, "fold", patient), patient))
        if len(names) < self.of:
            raise DataError(f"{self.of} folds need a patient each, and this site has {len(names)}; ask for fewer folds")
        fold = {name: place % self.of for place, name in enumerate(names)}
        part = {(self.number - 1) % self.of: 2, self.number % self.of: 1}
        dealt: list[list[int]] = [[], [], []]
        for place, patient in enumerate(patients):
            dealt[part.get(fold[patient], 0)].append(place)
        return dealt


class CaseSubset(Subset):
    """Some of the cases of several data sets."""

    def __init__(self, whole: Dataset, places: Sequence[int], patients: Sequence[str], labels: Tensor | None) -> None:
        super().__init__(whole, places)
        self.patients = tuple(patients[place] for place in places)
        self.labels = None if labels is None else labels[torch.tensor(places, dtype=torch.long)]


class Cases(TensorDataset):
    """Cases that lie in memory: inputs, targets and the patient each case belongs to."""

    def __init__(self, inputs: Tensor, targets: Tensor, patients: Sequence[str]) -> None:
        super().__init__(inputs, targets)
        if len(patients) != len(inputs):
            raise ValueError(f"{len(inputs)} cases but {len(patients)} patients")
        self.patients = tuple(patients)

    @property
    def inputs(self) -> Tensor:
        return self.tensors[0]

    @property
    def targets(self) -> Tensor:
        return self.tensors[1]


@dataclass(frozen=True)
class SiteData:
    """The three parts of one site's data; no patient is in two of them.

    >>> patients, parts = np.array([0, 0, 1, 2]), np.array([0, 1, 2])  # each patient in one part
    >>> data = SiteData.by_patient(np.zeros((4, 3)), np.zeros(4), patients, ["p", "q", "r"], parts)
    >>> len(data.train), len(data.validation), len(data.test), data.absent
    (2, 1, 1, [])
    >>> SiteData.parts_by_draw(["p", "p", "q", "r"], shares=(0.5, 0.25, 0.25), seed=0)  # groups go whole
    array([1, 1, 2, 0])
    """

    Shares = Annotated[splits.Shares, Field(description="of train, validation and test")]  # the type of a key
    parts_by_draw, dirichlet = staticmethod(splits.parts_by_draw), staticmethod(splits.dirichlet)

    train: Dataset
    validation: Dataset
    test: Dataset
    survey: Survey | None = field(default=None, kw_only=True)  # what was found on the way, where the task looks for it

    @classmethod
    def by_patient(
        cls,
        inputs: np.ndarray,
        targets: np.ndarray,
        patients: np.ndarray,
        names: Sequence[str],
        parts: np.ndarray | None = None,
    ) -> Self:
        """Put each patient's cases into the patient's part.

        inputs: [cases, ...]; targets: [cases, ...]; patients: [cases] numbers of patients; names and parts: per
        patient; without parts, patients take turns.
        """

        def cases_of(chosen: np.ndarray) -> Cases:
            own = torch.from_numpy(np.ascontiguousarray(inputs[chosen], np.float32))
            labels = torch.from_numpy(np.ascontiguousarray(targets[chosen], np.int64))
            return Cases(own, labels, [names[patient] for patient in patients[chosen]])

        return cls.in_parts((splits.parts_in_turn(len(names)) if parts is None else parts)[patients], cases_of)

    @classmethod
    def in_memory(cls, parts: Iterable[tuple[Tensor, Tensor, Sequence[str]]]) -> Self:
        """Hold three parts as tensors: the inputs and targets of cases, and the patient each case belongs to."""
        return cls(*(Cases(*part) for part in parts))

    @classmethod
    def in_parts(cls, parts: np.ndarray, cases_of: Callable[[np.ndarray], Dataset]) -> Self:
        """Make three parts of the places of their cases. parts: [cases] 0 train, 1 validation, 2 test, -1 nowhere."""
        return cls(*(cases_of(np.flatnonzero(parts == part)) for part in range(3)))

    @classmethod
    def read_later(
        cls, items: Sequence[tuple[Path, int]], patients: Sequence[str], parts: np.ndarray, read: Callable[..., Case]
    ) -> Self:
        """Hold files with their classes; each is read when it is asked for, but for those that the site's cache keeps.

        read: makes a case of a file and its class; parts: as of `in_parts`.
        """
        return cls.in_parts(parts, lambda own: LazyCases([items[i] for i in own], [patients[i] for i in own], read))

    @property
    def absent(self) -> list[str]:
        """The plan's structures, modalities and columns that the site has not."""
        return list(self.survey.absent) if self.survey else []


class Task(Section):
    """A task of the plan: where a hospital's cases come from, what is learned of them, and what becomes of new ones.

    Its own keys and methods are the source of cases; `goal` is what is learned, `use` what becomes of new cases.
    Subclasses declare `name: Literal["..."] = "..."`.

    >>> from typing import ClassVar, Self
    >>> from medsilo.extend import Classification, Task
    >>> class Gait(Task):
    ...     channels: ClassVar = 3
    ...     goal: ClassVar = Classification(("steady", "unsteady"))
    ...     def default_network(self): ...
    ...     def load(self, site, sites, seed, folder): ...
    >>> Gait(name="gait").goal.metric
    'accuracy'
    >>> Task.seed_for(0, "st-anna", "split") == Task.seed_for(0, "north", "split")
    False
    """

    title: ClassVar[str]
    synthetic: ClassVar[bool] = False
    needs_data: ClassVar[bool] = False  # whether a site has to say where its data lie
    split_by_site: ClassVar[bool] = False  # whether a site can decide who is in which part, by `data` in its settings
    scripted: ClassVar[bool] = False  # whether a training script of the user's own learns it, with data that it has
    most_sites: ClassVar[int | None] = None  # of a study; None: any number

    name: str
    fold: Fold | None = Field(
        None,
        description="`{number: 1, of: 5}`: patients take turns in the test part, by themselves at each site; "
        "`medsilo compare --folds 5` runs all of them. `null`: the task's own parts",
    )

    @property
    @abstractmethod
    def goal(self) -> Objective:
        """The goal: what is learned, and how it is measured."""

    @property
    def use(self) -> Inference:
        """The use of models on new cases."""
        return Inference()

    @abstractmethod
    def default_network(self) -> Network | str:
        """The network that this task uses when the plan names none; its name alone stands for its usual numbers."""

    # ------------------------------------------------------------------ what a case is
    @property
    @abstractmethod
    def channels(self) -> int:
        """The numbers at each place of an input, or in one that has no places."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one case's input; None when cases differ."""
        return None

    @staticmethod
    def seed_for(seed: int, *purpose: str | int) -> int:
        """Return the seed of one use, which follows from the plan's and from words that name the use alone."""
        return seed_for(seed, *purpose)

    @property
    def sliced(self) -> bool:
        """Cases are slices of patients' volumes."""
        return False

    @property
    def largest_input(self) -> float:
        """A number that no input of a network is far above; by default, 16 bits as stored."""
        return 65_535.0

    # ------------------------------------------------------------------ whose cases they are

    def across_patients(self) -> str:
        """Return what a hospital's other patients change in a patient's cases, and the remedy; nothing where nothing.

        Each class says it for itself, also one that derives from another.
        """
        raise NotImplementedError

    @property
    def not_private(self) -> str:
        """Return why a patient may move a batch's gradient by more than that patient's own; nothing where none may."""
        if self.goal.unbounded:
            return self.goal.unbounded
        if self.fold is not None:
            return "task.fold deals patients in turn, so that one who leaves moves others; leave it out"
        if self.synthetic:
            return ""  # nobody is behind what is drawn
        if "across_patients" not in vars(type(self)):
            return f"task {self.name} does not say what it computes across patients; choose a task of your own data"
        return self.across_patients()

    @property
    def mixes_patients(self) -> bool:
        """Return whether a patient's cases may be in several parts: a site is a person, or the plan asks for it."""
        return False

    @property
    def deals(self) -> bool:
        """Return whether the plan deals one folder of a site's own to simulated sites."""
        return False

    # ------------------------------------------------------------------ a site's cases
    @abstractmethod
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        """One site's data. `sites` are all the study's sites in sorted order; `folder` is the site's data folder."""

    def tests_as(self, other: "Task") -> bool:
        """Return whether both test the same cases in the same way, so that their scores can be compared."""
        return self == other

    def check_source(self, source: DataSource | None) -> None:
        """Raise a DataError if it is clear without a look at the data that they can't be read."""
        if source is not None:
            source.check_folder()
        elif self.needs_data:
            raise DataError(f"task {self.name} needs data: set 'data' in this site's medsilo.yaml, or give --data")

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> SiteData:
        """One site's data in the parts of the plan's fold, if it has one: what training and tests work with."""
        data = self.read(site, sites, seed, source)
        if self.fold is None:
            return data
        if self.mixes_patients:
            raise DataError("a patient's cases are in several parts of this task or split, so it has no folds")
        return folded(data, self.fold, (source.split if source else None) or 0)

    def read(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> SiteData:
        """One site's data as its settings say where they lie: how all who need data come by them."""
        if source is None:
            return self.load(site, sites, seed, None)
        source.check_folder()
        if source.is_described or source.cache == "disk":
            what = "give nothing but folder, cache (memory or none) and cache_memory under 'data'"
            raise DataError(f"task {self.name} has a layout of its own; {what}")
        if links := links_out(source.folder):
            what = f"{len(links)} files or folders in the data folder are links that lead out of it; copy them there"
            raise DataError(what, private=", ".join(links))
        data, memory = self.load(site, sites, seed, source.folder), Memory(source)
        for part in PARTS:
            cases = getattr(data, part)
            if isinstance(cases, LazyCases):
                cases.keep(memory)
        return data

    def survey(self, site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> Survey:
        """Return what is found when the data are read as training reads them; it raises nothing that data can cause."""
        try:
            data = self.read(site, sites, seed, source and source.once())
        except DataError as error:
            return Survey.stopped(str(error), error.private)
        return surveyed({part: getattr(data, part) for part in PARTS}, self.mixes_patients)

    def class_counts(self, data: Dataset) -> list[int] | None:
        """The cases of each class in one part; None where cases have no class, or a data set does not know them."""
        labels = labels_of(data) if self.goal.classifies else None
        return None if labels is None else torch.bincount(labels, minlength=self.goal.classes).tolist()

    # ------------------------------------------------------------------ how a network meets them
    @property
    def variation(self) -> Draw | None:
        """Makes of a case, by a seed, what a pass of training sees: an augmented image, or a piece; None: itself."""
        return None

    draws: ClassVar[bool] = False  # whether training makes no passes over its cases, but learns what `drawn` draws

    def drawn(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        """Return what so many training batches consist of, one after another; drawn from the seed."""
        raise TypeError(f"task {self.name} draws no batches")

    @property
    def piece(self) -> Draw | None:
        """Makes of a case, by a seed, a piece in the task's shape, not varied; None: cases have that shape."""
        return None

    @property
    def evaluation_batch(self) -> int:
        """The number of cases that are evaluated together."""
        return 64

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """The network's output for whole cases, when it is evaluated or used."""
        return network(inputs)


def folded(data: SiteData, fold: Fold, split: int) -> SiteData:
    """Return a site's data with its patients dealt; split: the site's own number."""
    parts = [getattr(data, part) for part in PARTS]
    train, validation, test = dealt(parts, fold.parts(patients_of(ConcatDataset(parts)), split))
    return replace(data, train=train, validation=validation, test=test)


def dealt(parts: Sequence[Dataset], deals: Sequence[Sequence[int]]) -> list[Dataset]:
    """Return cases of several data sets by their places in all of these; in memory where all of them are."""
    whole: Dataset = ConcatDataset(parts)
    patients = patients_of(whole)
    if all(isinstance(part, Cases) for part in parts):
        inputs, targets = (torch.cat([getattr(part, of) for part in parts]) for of in ("inputs", "targets"))
        return [Cases(inputs[places], targets[places], [patients[place] for place in places]) for places in deals]
    labels = labels_of(whole)
    return [CaseSubset(whole, places, patients, labels) for places in deals]


def drawn_cases(cases: Dataset, draw: Draw | None, seed: int, names: Sequence[str] | None = None) -> Dataset:
    """Return cases as a task draws each of them, or as they are."""
    return DrawnCases(cases, draw, seed, names) if draw else cases


def patients_of(data: Dataset) -> Sequence[str]:
    """The patient of every case; where a data set knows none, each case is its own."""
    if isinstance(data, ConcatDataset):
        return [patient for part in data.datasets for patient in patients_of(part)]
    known: Sequence[str] | None = getattr(data, "patients", None)
    return [str(case) for case in range(len(data))] if known is None else known  # type: ignore[arg-type]


def records_of(data: Dataset) -> Sequence[str] | None:
    """Return the record (file, or line of a table) of every case; None where each case is one by itself."""
    return getattr(data, "records", None)


def names_of(data: Dataset) -> Sequence[str] | None:
    """Return a name of every case that no other case changes; None where the data set has none."""
    return getattr(data, "names", None)


def labels_of(data: Dataset) -> Tensor | None:
    """The class of every case, where the data set knows them without reading its images."""
    if isinstance(data, ConcatDataset):
        several = [labels_of(part) for part in data.datasets]
        return None if any(one is None for one in several) else torch.cat(several)  # type: ignore[arg-type]
    return labels_in(data.targets) if isinstance(data, Cases) else getattr(data, "labels", None)


def label_counts(data: Dataset, classes: int) -> list[int]:
    """Return how often each label occurs among a part's cases: a class's cases, or a mask's places."""
    labels = labels_of(data)
    every = (data[case][1] for case in range(len(data))) if labels is None else [labels]  # type: ignore[arg-type]
    counts = torch.zeros(classes, dtype=torch.int64)
    for one in every:
        counts += torch.bincount(labels_in(torch.as_tensor(one).flatten().long()), minlength=classes)
    return counts.tolist()


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


def check_absent(told: Sequence[str], task: Task) -> None:
    """Raise Refused where a hospital says that it lacks what none may lack in a task's data."""
    if strangers := sorted(set(told) - set(getattr(task, "may_be_absent", ()))):
        raise Refused(f"it lacks {plain(strangers[0], 40)}, which no hospital may lack in this plan")
