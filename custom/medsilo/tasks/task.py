"""The base of tasks: where cases come from, what is learned, what becomes of new cases. No federation is known here."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core import optional
from medsilo.core.errors import DataError, Refused
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.learning.seeds import seed_for
from medsilo.models.network import Network
from medsilo.tasks.objective import Objective

if TYPE_CHECKING:  # only a site reads cases
    from medsilo.learning.drawn import Draw, DrawBatch
    from medsilo.tasks.inference import Inference
    from medsilo.tasks.site_data import SiteData
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.survey import Survey


class Fold(Section):
    """One of several equal parts of a site's patients, which is tested. The next part validates."""

    number: int = Field(ge=1, le=100, description="which of them is tested")
    of: int = Field(ge=3, le=100, description="how many there are: each patient is tested in one of them")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Fold":
        if self.number > self.of:
            raise ValueError(f"fold {self.number} of {self.of} does not exist; there are {self.of}")
        return self


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
    def use(self) -> "Inference":
        """The use of models on new cases."""
        return optional.Inference()

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
    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> "SiteData":
        """One site's data. `sites` are all the study's sites in sorted order; `folder` is the site's data folder."""

    def tests_as(self, other: "Task") -> bool:
        """Return whether both test the same cases in the same way, so that their scores can be compared."""
        return self == other

    def check_source(self, source: "DataSource | None") -> None:
        """Raise a DataError if it is clear without a look at the data that they can't be read."""
        if source is not None:
            source.check_folder()
        elif self.needs_data:
            raise DataError(f"task {self.name} needs data: set 'data' in this site's medsilo.yaml, or give --data")

    def site_data(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """One site's data in the parts of the plan's fold, if it has one: what training and tests work with."""
        return optional.folded_data(self, self.read(site, sites, seed, source), source)

    def read(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "SiteData":
        """One site's data as its settings say where they lie: how all who need data come by them."""
        return optional.read_folder(self, site, sites, seed, source)

    def survey(self, site: str, sites: Sequence[str], seed: int, source: "DataSource | None") -> "Survey":
        """Return what is found when the data are read as training reads them; it raises nothing that data can cause."""
        return optional.survey_of(self, lambda: self.read(site, sites, seed, source and source.once()))

    # ------------------------------------------------------------------ how a network meets them
    @property
    def variation(self) -> "Draw | DrawBatch | None":
        """Makes of a case, by a seed, what a pass of training sees: an augmented image, or a piece; None: itself."""
        return None

    draws: ClassVar[bool] = False  # whether training makes no passes over its cases, but learns from `draw_batches`

    def draw_batches(self, cases: Dataset, batch: int, steps: int, seed: int) -> Dataset:
        """Return what so many training batches consist of, one after another; drawn from the seed."""
        raise TypeError(f"task {self.name} makes no batches of its own")

    @property
    def piece(self) -> "Draw | None":
        """Makes of a case, by a seed, a piece in the task's shape, not varied; None: cases have that shape."""
        return None

    @property
    def evaluation_batch(self) -> int:
        """The number of cases that are evaluated together."""
        return 64

    def infer(self, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """The network's output for whole cases, when it is evaluated or used."""
        return network(inputs)


def check_absent(told: Sequence[str], task: Task) -> None:
    """Raise Refused where a hospital says that it lacks what none may lack in a task's data."""
    if strangers := sorted(set(told) - set(getattr(task, "may_be_absent", ()))):
        raise Refused(f"it lacks {plain(strangers[0], 40)}; every hospital needs that under this plan")
