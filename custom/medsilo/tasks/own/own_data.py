"""Define what all tasks with a hospital's images, tables or recordings have in common."""

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

if TYPE_CHECKING:  # this import is only for type checking, because only sites read cases
    from medsilo.tasks.cache import Facts, HeldEntry, PreparedEntry
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey


class OwnData(Task):
    """Base class of tasks whose data and split each site's settings describe."""

    split_by_site: ClassVar[bool] = True
    by_patient: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    shares: Shares = Field(
        default=(0.6, 0.2, 0.2),
        description="shares of patients for training, validation and test; without effect if a site's data or "
        "settings fix the split",
    )
    split: int = Field(default=0, ge=0, lt=2**32, description="seed of the split")
    partition: Partition | None = Field(
        default=None, description="how to divide one folder or table among simulated sites"
    )

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
        """Return one site's training, validation and test data."""
        from medsilo.tasks.own import reading

        return reading.data_of(self, site, sites, source)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "Survey":
        from medsilo.tasks.own import reading

        return reading.survey_of(self, site, sites, source)

    def completed(self, data: "SiteData") -> "SiteData":
        """Apply the steps of preparation that depend on the training cases, such as standardisation."""
        return data

    def absent(self, source: "DataSource") -> tuple[str, ...]:
        """Return the plan's structures and columns that the site's settings declare as missing."""
        names = {*source.unannotated}
        if unknown := sorted(names - {*self.may_be_absent}):
            known = ", ".join(self.may_be_absent) or "nothing in this task"
            raise DataError(
                f"data.unannotated: {unknown[0]!r} can't be absent; {known} can be absent", ", ".join(names)
            )
        return tuple(name for name in self.may_be_absent if name in names)

    @property
    def may_be_absent(self) -> tuple[str, ...]:
        """The plan's structures or columns that a hospital's data may lack."""
        return ()

    @abstractmethod
    def examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        """Read a site's data once; return the survey, and the training, validation and test part of the data.

        Args:
            site, sites, source: as for `site_data`
        """


class OwnFolder(OwnData):
    """Base class of tasks that read the files in a hospital's folder. The key `data` in the hospital's medsilo.yaml
    describes the files.

    A subclass must define `cases_in`, which reads cases from the files of one image or recording. This base class finds
    files, classes and patients, divides the cases into parts and folds, caches cases, and surveys the data for `medsilo
    check`.

    Subclasses may override `listing_of`, `classes_of`, `maker`, `note` and `told_of`, which list files, find classes,
    prepare files, note facts, and fill the survey.

    >>> from medsilo.extend import Classification, OwnFolder
    >>> class Traces(OwnFolder):
    ...     channels: ClassVar = 1
    ...     goal: ClassVar = Classification(("well", "ill"))
    ...     def default_network(self): ...
    ...     def cases_in(self, files): return torch.tensor([[float(text) for text in files[0].read_text().split()]])
    >>> Traces(name="traces").shares
    (0.6, 0.2, 0.2)
    """

    files: ClassVar[str] = "images"  # the word that messages use for a data file

    def cases_in(self, files: tuple[Path, ...]) -> Tensor:
        """Read the files of one image or recording, and return the network's inputs, [cases, *shape]. Raises DataError
        if the files are faulty.
        """
        raise NotImplementedError

    @staticmethod
    def prepared(
        inputs: Tensor, targets: Tensor, shapes: Sequence[tuple[int, ...]], places: Tensor | None = None, **facts: Any
    ) -> "PreparedEntry":
        """Create a prepared image or recording from the given tensors.

        Args:
            inputs: the inputs, [cases, *shape]
            targets: the targets, [cases, ...]
            shapes: for each case, the labels that occur in the case
            places: the positions of some voxels of structures
            facts: further fields of `Facts`
        """
        from medsilo.tasks.own import reading

        return reading.prepared(inputs, targets, shapes, places, **facts)

    @staticmethod
    def load_held(cases: Dataset, number: int) -> "tuple[HeldEntry, int]":
        """Return the image or recording of a case, and the index of the case within it.

        Args:
            cases: a part of the site's data
            number: index of the case in this part
        """
        from medsilo.tasks.cache import held_case

        return held_case(cases, number)

    # ------------------------------------------------------------------ from files
    def listing_of(self, source: "DataSource", folder: Path) -> "CaseIndex":
        """List the images or recordings in a folder according to the site's settings.

        Args:
            source: the site's settings
            folder: the folder
        """
        from medsilo.tasks.case_index import CaseIndex

        return CaseIndex.of_cases(source, folder, isinstance(self.goal, Segmentation))

    def maker(self, source: "DataSource") -> "Callable[..., PreparedEntry]":
        """Return a function that prepares an image or recording from its files, label and patient.

        The label is the path of a mask, or the index of the class in a classification.
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
        """Return the labels of the structures that a site did not annotate; or, if structures may overlap, their
        numbers, counted from 1.
        """
        structures = self.goal.structures if isinstance(self.goal, Segmentation) else {}
        if self.goal.overlaps:
            return [number for number, name in enumerate(structures, 1) if name in source.unannotated]
        return [label for name, labels in structures.items() for label in labels if name in source.unannotated]

    def classes_of(self, listing: "CaseIndex", source: "DataSource") -> Mapping[str, int | None]:
        """Map the name of each image or recording to its class; training ignores those without a class.

        Args:
            listing: the list of images or recordings
            source: the site's settings
        """
        from medsilo.tasks.own import reading

        return reading.classes_of(self, listing, source)

    def number_of(self, label: str | int) -> int:
        """Return the index of a label whose index or name is given. Raises DataError if the plan lacks the label."""
        names = self.goal.label_names
        if str(label) in names:
            return names.index(str(label))
        if str(label).isdecimal() and int(label) < self.goal.classes:
            return int(label)
        raise DataError(f"data.label_map: {label!r} is not among the plan's labels: {', '.join(names)}")

    def note(self, listing: "CaseIndex", every: Sequence[Any], source: "DataSource") -> None:
        """Hook for subclasses: record noteworthy facts about the images or recordings.

        Args:
            listing: the list of images or recordings, to which problems are added
            every: the images or recordings that could be read, each with the attributes `entry` and `facts`
            source: the site's settings
        """

    def told_of(self, every: Sequence[Any]) -> dict[str, Any]:
        """Return further fields of the survey: by default, sizes, spacings and intensities of images."""
        from medsilo.tasks.own import reading

        return reading.told_of(every)

    def chosen_cases(self, facts: "Facts") -> list[int]:
        """Return the indices of the cases of an image or recording that training and tests use."""
        return list(range(len(facts.shown)))

    def examined(
        self, site: str, sites: Sequence[str], source: "DataSource | None"
    ) -> "tuple[Survey, Mapping[str, Dataset]]":
        from medsilo.tasks.own import reading

        return reading.examined(self, site, sites, source)
