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
    """A cross-validation fold. The patients of a site are divided into equally large groups. One group is for test, the
    next group for validation, and all other groups for training.
    """

    number: int = Field(ge=1, le=100, description="which fold is tested, counted from 1")
    of: int = Field(ge=3, le=100, description="number of folds; each patient is tested in one fold")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Fold":
        if self.number > self.of:
            raise ValueError(f"fold {self.number} of {self.of} does not exist; there are {self.of}")
        return self


class Task(Section):
    """A task of the plan. The task reads cases, defines the training objective, and applies models to new cases.

    The attribute `goal` is the training objective, and the attribute `use` describes how models are applied to new
    cases. Every subclass declares `name: Literal["..."] = "..."`.

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
    # True if a patient may have several cases, so that a site's weight is its number of patients.
    by_patient: ClassVar[bool] = False
    # True if the plan names labels or outcome columns that a site's data must contain.
    names_outcome: ClassVar[bool] = False
    split_by_site: ClassVar[bool] = False  # True if a site's settings can determine the split of the site's data
    scripted: ClassVar[bool] = False  # True if a user's training script reads the data and trains the model
    most_sites: ClassVar[int | None] = None  # limit on the number of sites in a study; None if there is no limit

    name: str
    fold: Fold | None = Field(
        None,
        description="`{number: 1, of: 5}`: the first of five folds of a cross-validation. Each site assigns its "
        "patients to folds; `medsilo compare --folds 5` runs all folds. `null`: the task's usual split",
    )

    @property
    @abstractmethod
    def goal(self) -> Objective:
        """The task's objective, which defines the loss and the metric."""

    @property
    def words(self) -> tuple[str, ...]:
        """Names of labels, structures or inputs with which the plan refers to a hospital's data."""
        return tuple(self.goal.structures) or self.goal.label_names

    @property
    def use(self) -> "Inference":
        from medsilo.tasks.inference import Inference

        return Inference()

    @abstractmethod
    def default_network(self) -> Network | str:
        """Return the task's default network, for plans that name no network. If the method returns only a name, the
        network with this name gets default settings.
        """

    # ------------------------------------------------------------------ inputs
    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels of an input [channels, *axes], or number of values of an input [values]."""

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
        """Order of magnitude of the largest value in the network's inputs; by default, the largest 16-bit value."""
        return 65_535.0

    # ------------------------------------------------------------------- patients

    def across_patients(self) -> str:
        """Describe how one patient's inputs depend on other patients of the hospital, and name a remedy.

        The description is empty if the inputs of a patient do not depend on other patients. Differential privacy
        requires that every task class defines this method itself, even if a base class defines the method.
        """
        raise NotImplementedError

    @property
    def not_private(self) -> str:
        """Return the reason why this task does not support differential privacy, or an empty string if the task
        supports it.
        """
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
        """True if the cases of one patient may be in more than one part of the data (training, validation, test).

        The cases of a patient may be in several parts if each site is one person, or if the plan allows several parts.
        """
        return False

    @property
    def deals(self) -> bool:
        """True if the plan divides the data in one folder among simulated sites."""
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
        """Return True if scores of this task and another task are comparable, because both tasks test the same cases in
        the same way.
        """
        return self == other

    def check_source(self, source: "DataSource | None") -> None:
        """Raise DataError if the site's settings show, before any file is read, that the data cannot be read."""
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
        """Read a site's data as training does, and return the survey. Faults of the data raise no errors; the survey
        lists them.

        Args:
            site, sites, seed, source: as for `site_data`
        """
        from medsilo.tasks.survey import survey_of

        return survey_of(self, lambda: self.read(site, sites, seed, source and source.once()))

    # ---------------------------------------------------------------------- the network's inputs
    @property
    def variation(self) -> "Draw | DrawBatch | None":
        """The function that augments or crops training cases at random from a given seed; None if training cases stay
        unchanged.
        """
        return None

    draws: ClassVar[bool] = False  # True if an epoch consists of random batches instead of a pass over all cases

    def draw_batches(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        """Return the cases of the next training batches, in the order of the batches.

        Args:
            cases: the training cases
            batch: the number of cases in a batch
            steps: the number of batches
            seed: seed of the random choice
        """
        raise TypeError(f"task {self.name} makes no batches of its own")

    @property
    def piece(self) -> "Draw | None":
        """The function that crops a case to the task's shape, at random from a given seed and without augmentation.

        If the method returns None, cases already have the task's shape.
        """
        return None

    @property
    def evaluation_batch(self) -> int:
        return 64

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return the network's output for whole cases, in the form that evaluation and prediction need.

        Args:
            network: the network
            inputs: a batch of cases
        """
        return network(inputs)


def check_absent(told: Sequence[str], task: Task) -> None:
    """Raise Refused if a hospital reports that its data lack a label that the task requires."""
    if strangers := sorted(set(told) - set(getattr(task, "may_be_absent", ()))):
        raise Refused(f"the hospital's data lack {plain(strangers[0], 40)}; under this plan, every hospital needs it")
