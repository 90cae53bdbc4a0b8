"""The bases of all that is optional in a plan: features, and layers around its sites and the server's channel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core.coarse import Resolution
from medsilo.core.section import Feature
from medsilo.course.outcome import Part
from medsilo.tasks.task import Task

Found = dict[str, Tensor]  # of every case, [cases, ...]


@dataclass(frozen=True)
class Finished:
    """A site's finished model, as a layer sees it with the cases of a part. All of it is exact, and stays there.

    >>> Finished("test", None, Path("a"), [1, 2], ("p", "p"), lambda look: {}).part
    'test'
    """

    part: Part
    task: Task
    folder: Path  # the site's, of the study
    cases: Dataset
    patients: Sequence[str]  # of each case
    look: Callable[[Callable[[Tensor, Tensor], Found]], Found]  # what a function finds in outputs and labels


class Layer(Feature):
    """A layer of a study: its keys in the plan are its fields, and all that it does is in this one class.

    A study calls the same object at the server and at every site, so it holds its numbers and no state; state lies in
    what `site` and `server` return.

    >>> class Silent(Layer):
    ...     name: str = "silent"
    >>> Silent().site("a site", place=None)
    'a site'
    """

    name: str
    files: ClassVar[tuple[str, ...]] = ()  # of a site's part of a run, or of the run, that go with its model

    def charges(self, task: str, number: int) -> Mapping[str, float]:
        """Return what this layer lets out with normal noise in an answer to a task, in a round, for the hospital's
        ledger: by its name there, the noise's standard deviation over the most that one unit's data change it."""
        return {}

    # What a layer asks of the finished model, before the test (of validation cases) and with it (of test cases)
    def asks(self, plan: Any) -> Mapping[str, int]:
        """Return how many answers over the cases of each part it asks a site for, beside the study's own."""
        return {}

    def look(self, finished: Finished, chosen: Any) -> Any:
        """Return what a site finds, exactly. chosen: with the test, what the server tells this site."""

    def tells(self, part: Part, found: Any, resolution: Resolution, least: int) -> Any:
        """Return what of it leaves the site. least: the patients that a number must cover; None: nothing leaves."""

    def read(self, part: Part, told: Any, plan: Any, cases: int) -> Any:
        """Return what a site tells of so many cases, checked; raises Refused."""

    def choose(self, plan: Any, told: Mapping[str, Any], sites: Sequence[str]) -> Mapping[str, Any]:
        """Return what each site is told with the test, by what sites told of their validation cases."""
        return {}

    def concluded(self, plan: Any, folder: Path, told: Mapping[Part, Mapping[str, Any]]) -> Any:
        """Return what the summary has of it. folder: the run's; told: by part and site."""

    def says(self, plan: Any, output: Tensor, inputs: Tensor, folders: Sequence[Path]) -> Sequence[dict[str, Any]]:
        """Return columns of predictions.csv for each case. folders: a site's part of the run, and the run."""
        return [{} for _ in output]

    def marks(self, plan: Any, output: Tensor, folders: Sequence[Path]) -> Tensor | None:
        """Return the outputs of a second mask, [cases, labels, *grid]."""
        return None

    def card(self, plan: Any, folders: Sequence[Path]) -> Sequence[str]:
        """Return sentences for the card of an exported model."""
        return ()

    def kept(self, plan: Any, output: Tensor, target: Tensor, inputs: Tensor, folders: Sequence[Path]) -> Tensor | None:
        """Return how far each case keeps what this layer promises of its prediction, 0 to 1; None without a promise."""
        return None

    @classmethod
    def panel(cls, runs: Sequence[Any]) -> tuple[Path, Mapping[str, Any]] | None:
        """Return a section of the page of these runs: a template in the package's own folder, and its words."""
        return None

    def site(self, inner: Any, place: Any) -> Any:
        """Return a site that wraps another (`answer(parcel, stop)`); place says which hospital it is."""
        return inner

    def server(self, inner: Any, plan: Any) -> Any:
        """Return a channel that wraps another (`ask(sites, outgoing, receive, timeout)`, `pause(seconds)`)."""
        return inner
