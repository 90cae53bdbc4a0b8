"""Define the base class of tasks, and cross-validation folds."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.errors import DataError, Refused
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.learning.seeds import seed_for
from medsilo.models.network import Network
from medsilo.tasks.objective import Objective

if TYPE_CHECKING:  # this import is only for type checking, because only sites read cases
    from medsilo.learning.sampling import Draw, DrawBatch
    from medsilo.tasks.inference import Inference
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey


class Fold(Section):
    """A cross-validation fold. Each site's patients are divided into groups of about equal size: one for test, the next
    for validation, and all others for training.
    """

    number: int = Field(ge=1, le=100, description="which fold contains the test patients, counted from 1")
    of: int = Field(ge=3, le=100, description="number of folds; each patient is a test patient in one of them")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Fold":
        if self.number > self.of:
            raise ValueError(f"fold {self.number} of {self.of} does not exist; there are {self.of}")
        return self


class Task(Section):
    """A task of the plan. The task reads cases, defines the training objective, and applies models to new cases.

    The attribute `goal` is the training objective, and `use` describes how to apply models to new cases. Every subclass
    declares `name: Literal["..."] = "..."`.

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
    needs_data: ClassVar[bool] = False  # True if a site must name a folder of data
    # True if patients may have several cases; then, a site's weight is its number of patients by default
    by_patient: ClassVar[bool] = False
    # True if the plan names labels or outcome columns that every site's data must contain
    names_outcome: ClassVar[bool] = False
    split_by_site: ClassVar[bool] = False  # True if a site's settings can determine the split of the site's data
    scripted: ClassVar[bool] = False  # True if a user's training script reads the data and trains the model
    most_sites: ClassVar[int | None] = None  # limit on the number of sites in a study; None if there is no limit

    name: str
    fold: Fold | None = Field(
        None,
        description="`{number: 1, of: 5}`: run the first of five folds of a cross-validation. Each site assigns its "
        "patients to folds. `medsilo compare --folds 5` runs all five. `null`: the task's usual split",
    )

    @property
    @abstractmethod
    def goal(self) -> Objective:
        """The task's objective, which defines the loss and the metric."""

    @property
    def words(self) -> tuple[str, ...]:
        """The names in the plan that refer to a hospital's data: labels, structures or inputs."""
        return tuple(self.goal.structures) or self.goal.label_names

    @property
    def use(self) -> "Inference":
        from medsilo.tasks.inference import Inference

        return Inference()

    @abstractmethod
    def default_network(self) -> Network | str:
        """Return the network for plans that name none: a network, or the name of a network, which then gets default
        settings.
        """

    # ------------------------------------------------------------------ inputs
    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels of an input [channels, *axes], or of values of an input [values]."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one case's input; None if different cases have different shapes."""
        return None

    @staticmethod
    def seed_for(seed: int, *purpose: str | int) -> int:
        """Derive a seed for one purpose.

        Args:
            seed: the plan's seed
            purpose: words and numbers that describe the purpose
        """
        return seed_for(seed, *purpose)

    @property
    def sliced(self) -> bool:
        """True if each case is a slice of a patient's volume."""
        return False

    @property
    def largest_input(self) -> float:
        """Order of magnitude of the largest input value; by default, the largest 16-bit value."""
        return 65_535.0

    # ------------------------------------------------------------------- patients

    def across_patients(self) -> str:
        """Describe how a patient's inputs depend on other patients of the hospital, and the remedy; "" if they don't.

        For differential privacy, each task class must define this method itself, even if its base class does, so that
        nobody inherits a promise by accident.
        """
        raise NotImplementedError

    @property
    def not_private(self) -> str:
        """Return the reason why the task does not support differential privacy, or "" if it does."""
        if self.goal.unbounded:
            return self.goal.unbounded
        if self.fold is not None:
            return "task.fold deals patients in turn, so that one who leaves moves others; leave it out"
        if self.synthetic:
            return ""
        if "across_patients" not in vars(type(self)):
            return f"task {self.name} does not say what it computes across patients; choose a task of your own data"
        return self.across_patients()

    @property
    def mixes_patients(self) -> bool:
        """True if a patient's cases may be in several parts of the data, because each site is one person, or because
        the plan allows it.
        """
        return False

    @property
    def deals(self) -> bool:
        """True if the plan divides one folder's data among simulated sites."""
        return False

    # ------------------------------------------------------------------ a site's data
    @abstractmethod
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        """Return the data of one site.

        Args:
            site: the site's name
            sites: the sorted names of all sites in the study
            seed: the plan's seed
            folder: the site's data folder; None if the task is synthetic, or the site has no data folder
        """

    def tests_as(self, other: "Task") -> bool:
        """Return True if this task and another task test the same cases in the same way, so that their scores are
        comparable.
        """
        return self == other

    def check_source(self, source: "DataSource | None") -> None:
        """Raise DataError if the site's settings already show that the data can't be read."""
        if source is not None:
            source.check_folder()
        elif self.needs_data:
            raise DataError(f"task {self.name} needs data: set 'data' in this site's medsilo.yaml, or give --data")

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """Return one site's training, validation and test data, divided as the plan's fold requires.

        Args:
            site, sites, seed: as for `load`
            source: the site's settings of its data; None if the site has no settings
        """
        from medsilo.tasks.site_data import folded_data

        return folded_data(self, self.read(site, sites, seed, source), source)

    def read(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """Return one site's data as `load` divides them.

        Args:
            site, sites, seed, source: as for `site_data`
        """
        from medsilo.tasks.site_data import read_folder

        return read_folder(self, site, sites, seed, source)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "Survey":
        """Read a site's data as training does, and return the survey, which lists faults of the data instead of raising
        errors.

        Args:
            site, sites, seed, source: as for `site_data`
        """
        from medsilo.tasks.survey import survey_of

        return survey_of(self, lambda: self.read(site, sites, seed, source and source.once()))

    # ---------------------------------------------------------------------- the network's inputs
    @property
    def variation(self) -> "Draw | DrawBatch | None":
        """A function that augments or crops a training case at random, by a given seed; None if cases stay
        unchanged.
        """
        return None

    draws: ClassVar[bool] = False  # True if an epoch consists of random batches, instead of one pass over all cases

    def draw_batches(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        """Return the cases of the next training batches, in the order of the batches.

        Args:
            cases: the training cases
            batch: the number of cases in a batch
            steps: the number of batches
            seed: seed of the random choice
        """
        raise TypeError(f"task {self.name} does not make its own batches")

    @property
    def piece(self) -> "Draw | None":
        """A function that crops a case to the task's shape at random, by a given seed, without augmentation; None if
        cases already have this shape.
        """
        return None

    @property
    def evaluation_batch(self) -> int:
        return 64

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return the network's output for whole cases, as evaluation and prediction need it.

        Args:
            network: the network
            inputs: a batch of cases
        """
        return network(inputs)


def check_absent(missing: Sequence[str], task: Task) -> None:
    """Raise Refused if a hospital reports that its data lack something that the task requires."""
    if strangers := sorted(set(missing) - set(getattr(task, "may_be_absent", ()))):
        raise Refused(f"the hospital's data lack {plain(strangers[0], 40)}; under this plan, every hospital needs it")
