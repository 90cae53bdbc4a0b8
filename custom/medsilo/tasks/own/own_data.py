"""A hospital's own data in a plan's words: what tasks of images, tables and series agree on. reading.py reads them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core import optional
from medsilo.core.errors import DataError
from medsilo.learning.partial_labels import MOST
from medsilo.tasks.segmentation import Segmentation
from medsilo.tasks.shares import Partition, Shares
from medsilo.tasks.task import Task

if TYPE_CHECKING:  # only a site reads cases
    from medsilo.tasks.cache import Facts, HeldEntry, PreparedEntry
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey


class OwnData(Task):
    """Data that a site describes itself, with parts that it decides."""

    split_by_site: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    shares: Shares = Field(
        default=(0.6, 0.2, 0.2), description="of patients in training, validation and test, if the site fixes no parts"
    )
    split: int = Field(default=0, ge=0, lt=2**32, description="another number splits the patients in another way")
    partition: Partition | None = Field(default=None, description="deals one folder or table to simulated sites")

    @property
    def deals(self) -> bool:
        return self.partition is not None

    def across_patients(self) -> str:
        if self.deals:
            return "task.partition deals patients by their number, so that one who leaves moves others; leave it out"
        return ""

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        return self.site_data(site, sites, seed, None if folder is None else optional.DataSource(folder=folder))

    def read(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        return self.site_data(site, sites, seed, source)

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """Return the parts of the plan's fold, if it has one: they are dealt before anything is standardised."""
        return optional.reading.data_of(self, site, sites, source)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "Survey":
        return optional.reading.survey_of(self, site, sites, source)

    def _finished(self, data: "SiteData") -> "SiteData":
        """Return what depends on who is in the training part."""
        return data

    def absent(self, source: "DataSource") -> tuple[str, ...]:
        """Return which of the plan's structures and columns a site says that it has not."""
        names = {*source.unannotated}
        if unknown := sorted(names - {*self.may_be_absent}):
            known = ", ".join(self.may_be_absent) or "nothing in this task"
            raise DataError(f"data.unannotated: {unknown[0]!r} can't be absent; {known} can", ", ".join(names))
        return tuple(name for name in self.may_be_absent if name in names)

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        """The plan's names of what a hospital need not have: structures, columns."""
        return ()

    @abstractmethod
    def _examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        """Return what there is in a site's data, read once, and the parts."""


class OwnFolder(OwnData):
    """A task over files in a hospital's folder, each with one case or several, as `data` in its medsilo.yaml says.

    A subclass says in `cases_in` how files are read. Which there are, their classes and patients, by a table or by
    patterns of names; parts, folds, the cache and `medsilo check`: all that is here. What of it is another in a
    subclass has a method: `listing_of`, `classes_of`, `maker`, `note`, `told_of`.

    >>> from medsilo.extend import Classification, OwnFolder
    >>> class Traces(OwnFolder):
    ...     channels: ClassVar = 1
    ...     goal: ClassVar = Classification(("well", "ill"))
    ...     def default_network(self): ...
    ...     def cases_in(self, files): return torch.tensor([[float(text) for text in files[0].read_text().split()]])
    >>> Traces(name="traces").shares
    (0.6, 0.2, 0.2)
    """

    files: ClassVar[str] = "images"  # what they are called

    def cases_in(self, files: tuple[Path, ...]) -> Tensor:
        """Return what the network reads of one entry's files, [cases, *shape]; raises DataError."""
        raise NotImplementedError

    @staticmethod
    def prepared(
        inputs: Tensor, targets: Tensor, shown: Sequence[tuple[int, ...]], places: Tensor | None = None, **told: Any
    ) -> "PreparedEntry":
        """Return an entry that is ready. shown: the labels that each of its cases shows; told: more of its facts."""
        return optional.reading.prepared(inputs, targets, shown, places, **told)

    @staticmethod
    def load_held(cases: Dataset, number: int) -> "tuple[HeldEntry, int]":
        """Return the entry that a case is of, and which of its cases it is."""
        return optional.held_case(cases, number)

    # ------------------------------------------------------------------ from files
    def listing_of(self, source: "DataSource", folder: Path) -> "CaseIndex":
        """Return the entries in a folder, as the site describes them."""
        return optional.CaseIndex.of_cases(source, folder, isinstance(self.goal, Segmentation))

    def maker(self, source: "DataSource") -> "Callable[..., PreparedEntry]":
        """Return what makes an entry ready, of its files, its label and its patient.

        label: a mask's file; of a classification the class.
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
                "data.unannotated names all structures of the plan, so this site has nothing to learn; name fewer"
            )
        return names

    def _undrawn(self, source: "DataSource") -> list[int]:
        """Return the labels that nobody drew at a site; numbers of structures, 1, 2, ..., where these overlap."""
        structures = self.goal.structures if isinstance(self.goal, Segmentation) else {}
        if self.goal.overlaps:
            return [number for number, name in enumerate(structures, 1) if name in source.unannotated]
        return [label for name, labels in structures.items() for label in labels if name in source.unannotated]

    def classes_of(self, listing: "CaseIndex", source: "DataSource") -> Mapping[str, int | None]:
        """Return the class of every entry of a classification, by its name; None where nothing is learned of it."""
        return optional.reading.classes_of(self, listing, source)

    def number_of(self, label: str | int) -> int:
        """Return a plan's label, given by its name or its number."""
        names = self.goal.label_names
        if str(label) in names:
            return names.index(str(label))
        if str(label).isdecimal() and int(label) < self.goal.classes:
            return int(label)
        raise DataError(f"data.label_map: {label!r} is not among the plan's labels: {', '.join(names)}")

    def note(self, listing: "CaseIndex", every: Sequence[Any], source: "DataSource") -> None:
        """Note what is odd about entries that could be read, each with its `entry` and its `facts`."""

    def told_of(self, every: Sequence[Any]) -> dict[str, Any]:
        """Return what a survey tells of entries, by its fields; by default of images."""
        return optional.reading.told_of(every)

    def _chosen(self, facts: "Facts") -> list[int]:
        """Return which of an entry's cases are used."""
        return list(range(len(facts.shown)))

    def _examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        return optional.reading.examined(self, site, sites, source)
