"""The base of tasks: data, network, loss and metric of one medical question. It knows nothing of federations."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from medsilo.core.errors import DataError, Refused
from medsilo.core.section import Section
from medsilo.learning.loop import Compute, DrawnCases
from medsilo.models.network import Network
from medsilo.tasks.bundled import InMonai
from medsilo.tasks.folds import Dealt, Fold, together
from medsilo.tasks.listing import links_out
from medsilo.tasks.metrics import BY_PATIENT, CONFUSION, Counts, Figures, Measures, by_patient, means
from medsilo.tasks.postprocessing import Postprocessings
from medsilo.tasks.ready import LazyCases, Memory
from medsilo.tasks.scans import Scan, read_scan
from medsilo.tasks.sources import DataSource
from medsilo.tasks.survey import (
    PARTS,
    PartFacts,
    Problem,
    Severity,
    Survey,
    digest,
    in_two_parts,
    labels_in,
    ranges_of,
    repeated,
)


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
    """The three parts of one site's data; no patient is in two of them."""

    train: Dataset
    validation: Dataset
    test: Dataset
    # Of the training images, millimetres along x, y (and z), where images have a spacing.
    spacings: Sequence[Sequence[float]] = field(default=(), kw_only=True)
    survey: Survey | None = field(default=None, kw_only=True)  # what was found on the way, where the task looks for it


class Task(Section):
    """A task of the plan: its name and its numbers. Subclasses declare `name: Literal["..."] = "..."`."""

    title: ClassVar[str]
    metric: ClassVar[str]  # the name of what `case_scores` measures; higher is better
    metric_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    synthetic: ClassVar[bool] = False
    channels: ClassVar[int]
    classes: ClassVar[int]
    largest_input: ClassVar[float] = 65_535.0  # no input of a network is far above it; by default, 16 bits as stored

    name: str = ""  # only a task that helps another has none
    fold: Fold | None = Field(
        None,
        description="`{number: 1, of: 5}`: patients take turns in the test part, by themselves at each site; "
        "`medsilo compare --folds 5` runs all of them. `null`: the task's own parts",
    )

    @property
    def refines(self) -> bool:
        """Return whether it needs a finished study's model, whose labels are among a network's inputs."""
        return False

    def beside(self, given: Path | None, finished: Path | None, compute: Compute) -> Self:
        """Return the same task for use on images, with the finished study's model that it needs on this device.

        given: that study's folder or its model; finished: else the folder in which it is looked for.
        """
        return self

    by_case: ClassVar[bool] = True  # whether a case's loss and score are its own; else the cases beside it matter
    predictor: ClassVar[str] = ""  # the name of what predicts new cases; "images" where `inputs_of` takes their files
    split_by_site: ClassVar[bool] = False  # whether a site can decide who is in which part, by `data` in its settings

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one case's input; None when cases differ."""
        return None

    @property
    def outputs(self) -> int:
        """The numbers that a network gives for a case, or for a place of it."""
        return self.classes

    @property
    def overlaps(self) -> bool:
        """Return whether structures may lie in each other, so that a network's outputs are no choice between them."""
        return False

    @property
    def unbounded(self) -> str:
        """Return why no bound holds for what one case does to a batch's gradient; nothing where one holds."""
        return ""

    def across_patients(self) -> str:
        """Return what a hospital's other patients change in a patient's cases, and the remedy; nothing where nothing.

        Each class says it for itself, also one that derives from another.
        """
        raise NotImplementedError

    @property
    def not_private(self) -> str:
        """Return why a patient may move a batch's gradient by more than that patient's own; nothing where none may."""
        if self.unbounded:
            return self.unbounded
        if "across_patients" not in vars(type(self)):
            return f"task {self.name} does not say what it computes across patients; choose a task of your own data"
        if self.fold is not None:
            return "task.fold deals patients in turn, so that one who leaves moves others; leave it out"
        return self.across_patients()

    needs_data: ClassVar[bool] = False  # whether a site has to say where its data lie
    most_sites: ClassVar[int | None] = None  # of a study; None: any number

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape that the network's output must have for an input of this shape; None where any will do."""
        return None

    @property
    def mixes_patients(self) -> bool:
        """Return whether a patient's cases may be in several parts: a site is a person, or the plan asks for it."""
        return getattr(self, "split", None) == "paper"

    @property
    def deals(self) -> bool:
        """Return whether the plan deals one folder of a site's own to simulated sites."""
        return False

    @abstractmethod
    def default_network(self) -> Network:
        """The network that this task uses when the plan names none."""

    @abstractmethod
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        """One site's data. `sites` are all the study's sites in sorted order; `folder` is the site's data folder."""

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
        refuse_links(source.folder)
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

    def inputs_of(self, values: np.ndarray) -> Tensor:
        """Return what the network reads of one image file, [cases, *shape]: for training and prediction alike.

        values: a volume [channels, D, H, W] or a flat image [channels, H, W], as tasks.scans reads them.
        """
        raise DataError(f"task {self.name} reads no image files")

    def images_among(self, files: Sequence[Path]) -> list[tuple[Path, ...]]:
        """Return the images among files, each with its channels' files in order; by default each file is one."""
        return [(file,) for file in files]

    def scan_of(self, image: tuple[Path, ...]) -> Scan:
        """Return one of these images."""
        return read_scan(image[0])

    def inputs_of_scan(self, scan: Scan) -> Tensor:
        """The same of an image that knows its spacing."""
        return self.inputs_of(scan.values)

    def labels_on(self, scan: Scan, output: Tensor) -> Tensor:
        """Return the label of each place of an image, from the network's output for its cases."""
        return self.labels_of(output, scan.values.shape[1:])

    def labels_of(self, output: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The label of each place of that image, from the network's output for its cases: [*grid]."""
        raise DataError(f"task {self.name} finds no masks")

    def in_monai(self) -> InMonai | None:
        """Return what `inputs_of` does to a file, and `infer` to its cases, in a MONAI bundle's words.

        None where MONAI has no such transforms.
        """
        return None

    @property
    def spacing(self) -> tuple[tuple[float, float], ...] | None:
        """The least and greatest spacing of the task's images along x, y (and z) in mm; None when it isn't known."""
        return None

    segments: ClassVar[bool] = False  # whether structures are found in images, with `masks`

    def found(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the label that is found at each place, [batch, *grid]; 0 where the target does not count."""
        raise TypeError(f"task {self.name} finds no masks")

    def masks(self, labels: Tensor) -> Tensor:
        """Return where each structure is, [batch, structures, *grid], by the label of each place."""
        raise TypeError(f"task {self.name} finds no masks")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the name of each label 0, 1, ...: its number where the task has no other."""
        return tuple(map(str, range(self.classes)))

    def own_values(self, source: DataSource | None) -> dict[int, int]:
        """Return the values that labels have in a site's own masks, where they differ from the plan's."""
        return {}

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The scalar that training minimises: a mean over the batch."""

    @property
    def cross_entropy(self) -> float:
        """Return how much the cross entropy of labels counts in the loss; 0 where it has no part in it."""
        return 0.0

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every case of a batch, [batch]."""
        return torch.stack([self.loss(output[case : case + 1], target[case : case + 1]) for case in range(len(output))])

    @abstractmethod
    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """The metric of every case of a batch: [batch], float32."""

    def score(self, scores: Tensor) -> float:
        """Return the metric of several cases from those of each."""
        return float(scores.mean())

    augments: ClassVar[bool] = False  # whether `augmented` changes anything

    def augmented(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """Return what training makes of one case: an augmented image, a patch of a volume; drawn from the seed."""
        return case

    draws: ClassVar[bool] = False  # whether training makes no passes over its cases, but learns what `drawn` draws

    def drawn(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        """Return what so many training batches consist of, one after another; drawn from the seed."""
        raise TypeError(f"task {self.name} draws no batches")

    crops: ClassVar[bool] = False  # whether cases have sizes of their own, and networks learn from pieces of them

    def cropped(self, case: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """A piece of a case, of the task's shape; drawn from the seed alone. `augmented` begins with it."""
        return case

    def pieces(self, data: Dataset, seed: int, names: Sequence[str] | None = None) -> Dataset:
        """The cases in the task's shape, without augmentation; always the same for a seed, by place or by name."""
        return DrawnCases(data, self.cropped, seed, names) if self.crops else data

    evaluation_batch: ClassVar[int] = 64  # cases that are evaluated together

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """The network's output for whole cases, when it is evaluated or used."""
        return network(inputs)

    # ------------------------------------------------------------------ the test
    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Return what is kept of every test case at its site, [batch] each; the metric is among it."""
        return {self.metric: self.case_scores(output, target)}

    def measuring(self, cases: Dataset) -> Callable[[Tensor, Tensor], Measures]:
        """Return what measures these cases of the test, whose outputs and targets come in order."""
        return self.measures

    @property
    def postprocessings(self) -> Postprocessings | None:
        """Return those among which validation cases choose before the test; None where nothing is to be chosen."""
        return None

    def trying(self, cases: Dataset) -> Callable[[Tensor, Tensor], Measures]:
        """Return what tries them on these cases, whose outputs and targets come in order; and measures the metric."""
        raise TypeError(f"task {self.name} has no postprocessing")

    def with_postprocessing(self, choice: Mapping[str, Any]) -> Self:
        """Return the task with what was chosen, for its test and for use; raises Refused."""
        if choice:
            raise Refused(f"task {self.name} has no postprocessing")
        return self

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return what a site tells of its test cases: counts that add up, none over fewer cases than `least`."""
        counts = means(measures, least)
        if self.metric in counts:
            counts |= means({self.metric + BY_PATIENT: by_patient(measures[self.metric], patients)}, 0)
        return counts

    @property
    def classifies(self) -> bool:
        """Return whether every case has one class."""
        return CONFUSION in self.layout

    @property
    def decides(self) -> bool:
        """Return whether cases are of two classes, so that a threshold decides."""
        return self.classifies and self.classes == 2

    def class_counts(self, data: Dataset) -> list[int] | None:
        """The cases of each class in one part; None where cases have no class, or a data set does not know them."""
        labels = labels_of(data) if self.classifies else None
        return None if labels is None else torch.bincount(labels, minlength=self.classes).tolist()

    @property
    def layout(self) -> dict[str, int]:
        """The names of all counts and how many numbers each has."""
        return {self.metric: 2, self.metric + BY_PATIENT: 2}

    def range_of(self, name: str) -> tuple[float, float]:
        """Return the least and greatest value that one case can have in a count that is a sum over cases."""
        return self.metric_range

    def told_range(self, name: str) -> tuple[float, float]:
        """Return the range to which a measure of one patient's case is cut before its coarse mean is told."""
        return self.range_of(name)

    def sway(self, data: Dataset, patients: Sequence[str]) -> float | None:
        """Return the share of a score over these cases that one patient can move; None: that of the patient's cases."""
        return None

    def figures(self, counts: Counts) -> Figures:
        """Return what is reported, from one site's counts or from those of several added up."""
        pairs = {name: counts[name] for name, length in self.layout.items() if length == 2 and name in counts}
        return {name: total / number if number else None for name, (total, number) in pairs.items()}


def refuse_links(folder: Path) -> None:
    """Raise DataError where something in a data folder lies elsewhere."""
    if links := links_out(folder):
        what = f"{len(links)} files or folders in the data folder are links that lead out of it; copy them there"
        raise DataError(what, private=", ".join(links))


def folded(data: SiteData, fold: Fold, split: int) -> SiteData:
    """Return a site's data with its patients dealt anew; split: the site's own number."""
    parts = [getattr(data, part) for part in PARTS]
    whole: Dataset = ConcatDataset(parts)
    patients = patients_of(whole)
    dealt = fold.parts(patients, split)
    if all(isinstance(part, Cases) for part in parts):
        inputs, targets = together(parts)
        sets: list[Dataset] = [Cases(inputs[p], targets[p], [patients[place] for place in p]) for p in dealt]
    else:
        labels = labels_of(whole)
        sets = [Dealt(whole, places, patients, labels) for places in dealt]
    train, validation, test = sets
    return replace(data, train=train, validation=validation, test=test)


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
    return data.targets if isinstance(data, Cases) else getattr(data, "labels", None)


def label_counts(data: Dataset, classes: int) -> list[int]:
    """Return how often each label occurs among a part's cases: a class's cases, or a mask's places."""
    labels = labels_of(data)
    every = (data[case][1] for case in range(len(data))) if labels is None else [labels]  # type: ignore[arg-type]
    counts = torch.zeros(classes, dtype=torch.int64)
    for one in every:
        counts += torch.bincount(torch.as_tensor(one).flatten().long(), minlength=classes)
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
            classes.update(labels_in(target))
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
        unreadable=sum(map(len, unreadable.values())),
        patients_in_two_parts=len(shared),
        duplicates=twice,
        size=ranges_of(shapes),
        intensity=intensity,
        problems=tuple(problems),
    )
