"""The base class of tasks: reading of cases, objective, and inference on new cases."""

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

if TYPE_CHECKING:  # not at run time, because only sites read cases
    from medsilo.learning.drawn import Draw, DrawBatch
    from medsilo.tasks.inference import Inference
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey


class Fold(Section):
    """A cross-validation fold: a site's patients are divided into `of` equal parts; one is the test, the next the
    validation part.
    """

    number: int = Field(ge=1, le=100, description="number of the part that is tested")
    of: int = Field(ge=3, le=100, description="number of folds; each patient is tested in one fold")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Fold":
        if self.number > self.of:
            raise ValueError(f"fold {self.number} of {self.of} does not exist; there are {self.of}")
        return self


class Task(Section):
    """A task of the plan: how cases are read, what is learned, and how a model is used on new cases.

    The task's keys and methods determine how cases are read, `goal` what is learned, and `use` the use of models.
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
    needs_data: ClassVar[bool] = False  # True if a site must name a folder of data
    # True if a patient may have several cases, so that updates are weighted by patients
    by_patient: ClassVar[bool] = False
    names_outcome: ClassVar[bool] = False  # True if the plan names labels or outcome columns in a site's data
    split_by_site: ClassVar[bool] = False  # True if `data` in a site's settings can determine its split
    scripted: ClassVar[bool] = False  # True if a user's training script reads the data and trains
    most_sites: ClassVar[int | None] = None  # limit on sites of a study; None: no limit

    name: str
    fold: Fold | None = Field(
        None,
        description="`{number: 1, of: 5}`: cross-validation fold; each site assigns its patients to folds; "
        "`medsilo compare --folds 5` runs all folds. `null`: the task's usual split",
    )

    @property
    @abstractmethod
    def goal(self) -> Objective:
        """The task's objective, with its loss and metric."""

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the plan that refer to a hospital's data: names of labels, of structures, or of inputs."""
        return tuple(self.goal.structures) or self.goal.label_names

    @property
    def use(self) -> "Inference":
        from medsilo.tasks.inference import Inference

        return Inference()

    @abstractmethod
    def default_network(self) -> Network | str:
        """Return the network to use if the plan names none. A name alone means default settings."""

    # ------------------------------------------------------------------ cases
    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels of an input with spatial or temporal axes, or of values of another input."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one case's input; None if shapes differ."""
        return None

    @staticmethod
    def seed_for(seed: int, *purpose: str | int) -> int:
        """Return a seed for a purpose, derived from the plan's seed and the words that name the purpose."""
        return seed_for(seed, *purpose)

    @property
    def sliced(self) -> bool:
        """True if cases are slices of patients' volumes."""
        return False

    @property
    def largest_input(self) -> float:
        """Order of magnitude of the largest input value. The default is the largest 16-bit value."""
        return 65_535.0

    # ------------------------------------------------------------------- the cases' patients

    def across_patients(self) -> str:
        """Return the effect of other patients of a hospital on a patient's inputs, with a remedy; empty without an
        effect.

        Differential privacy needs this. Every class must define it, also a derived class.
        """
        raise NotImplementedError

    @property
    def not_private(self) -> str:
        """Return the reason why this task does not support differential privacy, or an empty text if it does."""
        if self.goal.unbounded:
            return self.goal.unbounded
        if self.fold is not None:
            return "task.fold deals patients in turn, so that one who leaves moves others; leave it out"
        if self.synthetic:
            return ""  # synthetic patients need no privacy
        if "across_patients" not in vars(type(self)):
            return f"task {self.name} does not say what it computes across patients; choose a task of your own data"
        return self.across_patients()

    @property
    def mixes_patients(self) -> bool:
        """True if a patient's cases may be in several parts, because each site is a person, or the plan allows it."""
        return False

    @property
    def deals(self) -> bool:
        """True if the plan divides one folder among simulated sites."""
        return False

    # ------------------------------------------------------------------ a site's cases
    @abstractmethod
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        """Return one site's data. `sites` are all sites of the study in sorted order, `folder` is the site's data
        folder.
        """

    def tests_as(self, other: "Task") -> bool:
        """True if scores of two tasks can be compared, because both test the same cases in the same way."""
        return self == other

    def check_source(self, source: "DataSource | None") -> None:
        """Raise DataError if the settings alone show that the data cannot be read."""
        if source is not None:
            source.check_folder()
        elif self.needs_data:
            raise DataError(f"task {self.name} needs data: set 'data' in this site's medsilo.yaml, or give --data")

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """Return one site's data for training and tests, in the parts of the plan's fold if there is one."""
        from medsilo.tasks.site_data import folded_data

        return folded_data(self, self.read(site, sites, seed, source), source)

    def read(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """Read one site's data from the folder in its settings."""
        from medsilo.tasks.site_data import read_folder

        return read_folder(self, site, sites, seed, source)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "Survey":
        """Survey a site's data by reading them as training does. Faults of the data are part of the survey; they raise
        no error.
        """
        from medsilo.tasks.survey import survey_of

        return survey_of(self, lambda: self.read(site, sites, seed, source and source.once()))

    # ---------------------------------------------------------------------- the network's inputs
    @property
    def variation(self) -> "Draw | DrawBatch | None":
        """The augmentation or random cropping of training cases, by a seed; None without one."""
        return None

    draws: ClassVar[bool] = False  # True if training uses `draw_batches` instead of passes over all cases

    def draw_batches(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        """Return the cases of this number of training batches in order, sampled by the seed."""
        raise TypeError(f"task {self.name} makes no batches of its own")

    @property
    def piece(self) -> "Draw | None":
        """The random cropping of a case to the task's shape, by a seed, without augmentation; None if cases have this
        shape.
        """
        return None

    @property
    def evaluation_batch(self) -> int:
        """Number of cases in an evaluation batch."""
        return 64

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return the network's output for whole cases, in evaluation and prediction."""
        return network(inputs)


def check_absent(told: Sequence[str], task: Task) -> None:
    """Raise Refused if a hospital reports that its data lack labels that the task requires."""
    if strangers := sorted(set(told) - set(getattr(task, "may_be_absent", ()))):
        raise Refused(f"it lacks {plain(strangers[0], 40)}; every hospital needs that under this plan")
