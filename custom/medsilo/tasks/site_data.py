"""Hold one site's training, validation and test cases, in memory or on disk, with each case's patient and label."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from medsilo.core.errors import DataError
from medsilo.learning.compute import labels_in
from medsilo.learning.seeds import seed_for
from medsilo.tasks import splits
from medsilo.tasks.shares import PARTS
from medsilo.tasks.shares import Shares as WholeShares
from medsilo.tasks.sources import DataSource, links_out

if TYPE_CHECKING:
    from medsilo.tasks.survey import Survey
    from medsilo.tasks.task import Fold, Task


class CaseSubset(Subset):
    def __init__(self, whole: Dataset, indices: Sequence[int], patients: Sequence[str], labels: Tensor | None) -> None:
        super().__init__(whole, indices)
        self.patients = tuple(patients[place] for place in indices)
        self.labels = None if labels is None else labels[torch.tensor(indices, dtype=torch.long)]


class Cases(TensorDataset):
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
    """One site's data, divided into training, validation and test.

    >>> patients, parts = np.array([0, 0, 1, 2]), np.array([0, 1, 2])  # each patient in one part
    >>> data = SiteData.by_patient(np.zeros((4, 3)), np.zeros(4), patients, ["p", "q", "r"], parts)
    >>> len(data.train), len(data.validation), len(data.test), data.absent
    (2, 1, 1, [])
    >>> SiteData.parts_by_draw(["p", "p", "q", "r"], shares=(0.5, 0.25, 0.25), seed=0)  # groups go whole
    array([1, 1, 2, 0])
    """

    # type of a plan's key `shares`: the fractions of patients for training, validation and test
    Shares = Annotated[WholeShares, Field(description="shares of patients for training, validation and test")]
    parts_by_draw, dirichlet = staticmethod(splits.parts_by_draw), staticmethod(splits.dirichlet)

    train: Dataset
    validation: Dataset
    test: Dataset
    # the survey of the data, if the task made one while reading them
    survey: "Survey | None" = field(default=None, kw_only=True)

    @classmethod
    def by_patient(
        cls,
        inputs: np.ndarray,
        targets: np.ndarray,
        patients: np.ndarray,
        names: Sequence[str],
        parts: np.ndarray | None = None,
    ) -> Self:
        """Divide cases into training, validation and test, so that all cases of a patient are in one part.

        Args:
            inputs: the inputs, [cases, ...]
            targets: the targets, [cases, ...]
            patients: for each case, the index of the patient in `names`
            names: the patients' names
            parts: for each patient, 0 for training, 1 for validation, 2 for test; by default, patients are assigned to
                the parts in turn
        """

        def cases_of(chosen: np.ndarray) -> Cases:
            own = torch.from_numpy(np.ascontiguousarray(inputs[chosen], np.float32))
            labels = torch.from_numpy(np.ascontiguousarray(targets[chosen], np.int64))
            return Cases(own, labels, [names[patient] for patient in patients[chosen]])

        return cls.in_parts((splits.parts_in_turn(len(names)) if parts is None else parts)[patients], cases_of)

    @classmethod
    def in_memory(cls, parts: Iterable[tuple[Tensor, Tensor, Sequence[str]]]) -> Self:
        """Create data in memory from the inputs, targets and patients of the training, validation and test cases."""
        return cls(*(Cases(*part) for part in parts))

    @classmethod
    def in_parts(cls, parts: np.ndarray, cases_of: Callable[[np.ndarray], Dataset]) -> Self:
        """Create the data from an array that assigns each case to training, validation or test.

        Args:
            parts: for each case, 0 for training, 1 for validation, 2 for test, or -1 to leave the case out
            cases_of: a function that returns the data set of the cases with the given indices
        """
        return cls(*(cases_of(np.flatnonzero(parts == part)) for part in range(3)))

    @property
    def absent(self) -> list[str]:
        return list(self.survey.absent) if self.survey else []


def read_folder(task: "Task", site: str, sites: Sequence[str], seed: int, source: DataSource | None) -> SiteData:
    """Read one site's data from the folder that the site's settings name, or generate the data of a synthetic task."""
    if source is not None:
        source.check_folder()
    if source is None or task.synthetic:
        return task.load(site, sites, seed, None)
    if source.is_described:
        what = "give nothing but folder under 'data'"
        raise DataError(f"task {task.name} prescribes the layout of files; {what}")
    if links := links_out(source.folder):
        what = f"{len(links)} files or folders in the data folder are links that lead out of it; copy them there"
        raise DataError(what, private=", ".join(links))
    return task.load(site, sites, seed, source.folder)


def folded_data(task: "Task", data: SiteData, source: DataSource | None) -> SiteData:
    """Divide a site's data as the plan's cross-validation fold requires; without a fold, return the data unchanged."""
    if task.fold is None:
        return data
    if task.mixes_patients:
        raise DataError(
            "this task or split puts a patient's cases in several parts of the data, so a cross-validation is "
            "impossible"
        )
    return folded(data, task.fold, (source.split if source else None) or 0)


def folded(data: SiteData, fold: "Fold", split: int) -> SiteData:
    """Divide a site's data again, into the training, validation and test cases of a cross-validation fold.

    Args:
        split: the site's seed
    """
    parts = [getattr(data, part) for part in PARTS]
    train, validation, test = dealt(parts, places_in(fold, patients_of(ConcatDataset(parts)), split))
    return replace(data, train=train, validation=validation, test=test)


def places_in(fold: "Fold", patients: Sequence[str], split: int) -> list[list[int]]:
    """Return the indices of a fold's training, validation and test cases.

    The patients are sorted by a hash of their names and the site's seed, and assigned to folds in turn. Thus, a
    patient's fold depends neither on the study's seed nor on other sites.
    """
    names = sorted(set(patients), key=lambda patient: (seed_for(split, "fold", patient), patient))
    if len(names) < fold.of:
        raise DataError(f"{fold.of} folds need at least as many patients, and this site has fewer; ask for fewer folds")
    turn = {name: place % fold.of for place, name in enumerate(names)}
    part = {(fold.number - 1) % fold.of: 2, fold.number % fold.of: 1}
    dealt: list[list[int]] = [[], [], []]
    for place, patient in enumerate(patients):
        dealt[part.get(turn[patient], 0)].append(place)
    return dealt


def dealt(parts: Sequence[Dataset], deals: Sequence[Sequence[int]]) -> list[Dataset]:
    """Concatenate several data sets, and divide the cases into new data sets.

    The new data sets are in memory if all given data sets are.

    Args:
        deals: for each new data set, the indices of its cases in the concatenation
    """
    whole: Dataset = ConcatDataset(parts)
    patients = patients_of(whole)
    if all(isinstance(part, Cases) for part in parts):
        inputs, targets = (torch.cat([getattr(part, of) for part in parts]) for of in ("inputs", "targets"))
        return [Cases(inputs[places], targets[places], [patients[place] for place in places]) for places in deals]
    labels = labels_of(whole)
    return [CaseSubset(whole, places, patients, labels) for places in deals]


def patients_of(data: Dataset) -> Sequence[str]:
    """Return the patient of every case; if patients are unknown, each case counts as a separate patient."""
    if isinstance(data, ConcatDataset):
        return [patient for part in data.datasets for patient in patients_of(part)]
    known: Sequence[str] | None = getattr(data, "patients", None)
    if known is None and isinstance(data, Subset):
        every = patients_of(data.dataset)
        return [every[case] for case in data.indices]
    return [str(case) for case in range(len(data))] if known is None else known  # type: ignore[arg-type]


def records_of(data: Dataset) -> Sequence[str] | None:
    """Return the name of the file from which each case comes, or None if the data set has no such names."""
    return getattr(data, "records", None)


def names_of(data: Dataset) -> Sequence[str] | None:
    """Return a name for every case, independent of other cases; None if the data set has no names."""
    return getattr(data, "names", None)


def labels_of(data: Dataset) -> Tensor | None:
    """Return the class of every case, or None if only reading the cases would show the classes."""
    if isinstance(data, ConcatDataset):
        several = [labels_of(part) for part in data.datasets]
        return None if any(one is None for one in several) else torch.cat(several)  # type: ignore[arg-type]
    return data.targets if isinstance(data, Cases) else getattr(data, "labels", None)


def label_counts(data: Dataset, classes: int) -> list[int]:
    """Count the cases of each class of a classification, or the voxels of each label in the masks of a segmentation."""
    labels = labels_of(data)
    every = (data[case][1] for case in range(len(data))) if labels is None else [labels]  # type: ignore[arg-type]
    counts = torch.zeros(classes, dtype=torch.int64)
    for one in every:
        counts += torch.bincount(labels_in(torch.as_tensor(one).flatten().long()), minlength=classes)
    return counts.tolist()
