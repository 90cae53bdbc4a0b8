"""The plan's keys that tasks over a hospital's images, tables and series share. reading.py reads the data."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.errors import DataError
from medsilo.learning.partial_labels import MOST
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.shares import Partition, Shares
from medsilo.tasks.task import Task

if TYPE_CHECKING:  # not at run time, because only sites read cases
    from medsilo.tasks.cache import Facts, HeldEntry, PreparedEntry
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey


class OwnData(Task):
    """Base class of tasks over data that a site's settings describe. The site can also determine the split."""

    split_by_site: ClassVar[bool] = True
    by_patient: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    shares: Shares = Field(
        default=(0.6, 0.2, 0.2),
        description="shares of patients in training, validation and test, unless the site fixes the parts",
    )
    split: int = Field(default=0, ge=0, lt=2**32, description="seed of the split")
    partition: Partition | None = Field(default=None, description="divides one folder or table among simulated sites")

    @property
    def deals(self) -> bool:
        return self.partition is not None

    def across_patients(self) -> str:
        if self.deals:
            return "task.partition deals patients by their number, so that one who leaves moves others; leave it out"
        return ""

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        from medsilo.tasks.sources import DataSource

        return self.site_data(site, sites, seed, None if folder is None else DataSource(folder=folder))

    def read(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        return self.site_data(site, sites, seed, source)

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """Return one site's data in the parts of the plan's fold; parts are chosen before standardisation."""
        from medsilo.tasks.own import reading

        return reading.data_of(self, site, sites, source)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "Survey":
        from medsilo.tasks.own import reading

        return reading.survey_of(self, site, sites, source)

    def completed(self, data: "SiteData") -> "SiteData":
        """Finish the data by steps that depend on the training part, such as standardisation."""
        return data

    def absent(self, source: "DataSource") -> tuple[str, ...]:
        """Return the plan's structures and columns that a site's settings declare as unannotated."""
        names = {*source.unannotated}
        if unknown := sorted(names - {*self.may_be_absent}):
            known = ", ".join(self.may_be_absent) or "nothing in this task"
            raise DataError(f"data.unannotated: {unknown[0]!r} can't be absent; {known} can", ", ".join(names))
        return tuple(name for name in self.may_be_absent if name in names)

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        """Structures and columns of the plan that a hospital's data may lack."""
        return ()

    @abstractmethod
    def examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        """Read a site's data once, and return the survey and the parts."""


class OwnFolder(OwnData):
    """Base class of tasks over files in a hospital's folder, which `data` in its medsilo.yaml describes.

    A subclass defines `cases_in`, which reads the cases of an entry's files. `OwnFolder` finds files, classes and
    patients, makes parts and folds, caches cases, and supports `medsilo check`.

    Subclasses may override `listing_of`, `classes_of`, `maker`, `note` and `told_of`.

    >>> from medsilo.extend import Classification, OwnFolder
    >>> class Traces(OwnFolder):
    ...     channels: ClassVar = 1
    ...     goal: ClassVar = Classification(("well", "ill"))
    ...     def default_network(self): ...
    ...     def cases_in(self, files): return torch.tensor([[float(text) for text in files[0].read_text().split()]])
    >>> Traces(name="traces").shares
    (0.6, 0.2, 0.2)
    """

    files: ClassVar[str] = "images"  # word for files in messages

    def cases_in(self, files: tuple[Path, ...]) -> Tensor:
        """Read one entry's files as the network's input, [cases, *shape]; raises DataError."""
        raise NotImplementedError

    @staticmethod
    def prepared(
        inputs: Tensor, targets: Tensor, shown: Sequence[tuple[int, ...]], places: Tensor | None = None, **told: Any
    ) -> "PreparedEntry":
        """Make a prepared entry. `shown` holds the labels that occur in each case, `told` further fields of `Facts`."""
        from medsilo.tasks.own import reading

        return reading.prepared(inputs, targets, shown, places, **told)

    @staticmethod
    def load_held(cases: Dataset, number: int) -> "tuple[HeldEntry, int]":
        """Return the entry of a case, and the index of the case in the entry."""
        from medsilo.tasks.cache import held_case

        return held_case(cases, number)

    # ------------------------------------------------------------------ from files
    def listing_of(self, source: "DataSource", folder: Path) -> "CaseIndex":
        """Return the entries in a folder, by the site's settings."""
        from medsilo.tasks.case_index import CaseIndex

        return CaseIndex.of_cases(source, folder, isinstance(self.goal, Segmentation))

    def maker(self, source: "DataSource") -> "Callable[..., PreparedEntry]":
        """Return the function that prepares an entry from its files, its label and its patient.

        A label is the mask's file, or the class in a classification.
        """
        return self._of_class

    def _of_class(self, files: tuple[Path, ...], label: int, patient: str) -> "PreparedEntry":
        inputs = self.cases_in(files)
        return self.prepared(inputs, torch.full((len(inputs),), label), [(label,)] * len(inputs))

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        names = tuple(self.goal.structures) if isinstance(self.goal, Segmentation) else ()
        return names if 1 < len(names) <= MOST else ()

    def absent(self, source: "DataSource") -> tuple[str, ...]:
        names = super().absent(source)
        if isinstance(self.goal, Segmentation) and self.goal.structures.keys() <= {*names}:
            raise DataError(
                "data.unannotated names all structures of the plan, so this site has nothing to train on; name fewer"
            )
        return names

    def undrawn(self, source: "DataSource") -> list[int]:
        """Return the labels that a site did not annotate. If structures overlap, these are the structures' numbers 1,
        2, ....
        """
        structures = self.goal.structures if isinstance(self.goal, Segmentation) else {}
        if self.goal.overlaps:
            return [number for number, name in enumerate(structures, 1) if name in source.unannotated]
        return [label for name, labels in structures.items() for label in labels if name in source.unannotated]

    def classes_of(self, listing: "CaseIndex", source: "DataSource") -> Mapping[str, int | None]:
        """Return the class of every entry by the entry's name; None if training ignores the entry."""
        from medsilo.tasks.own import reading

        return reading.classes_of(self, listing, source)

    def number_of(self, label: str | int) -> int:
        """Return the number of a label of the plan, given its name or number."""
        names = self.goal.label_names
        if str(label) in names:
            return names.index(str(label))
        if str(label).isdecimal() and int(label) < self.goal.classes:
            return int(label)
        raise DataError(f"data.label_map: {label!r} is not among the plan's labels: {', '.join(names)}")

    def note(self, listing: "CaseIndex", every: Sequence[Any], source: "DataSource") -> None:
        """Record oddities of the entries that could be read; each item has an `entry` and its `facts`."""

    def told_of(self, every: Sequence[Any]) -> dict[str, Any]:
        """Return fields of the survey for these entries; by default, sizes, spacings and intensities of images."""
        from medsilo.tasks.own import reading

        return reading.told_of(every)

    def chosen_cases(self, facts: "Facts") -> list[int]:
        """Return the indices of an entry's cases to use."""
        return list(range(len(facts.shown)))

    def examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        from medsilo.tasks.own import reading

        return reading.examined(self, site, sites, source)
