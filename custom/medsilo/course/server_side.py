"""The server's side, as a method finds it."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from medsilo.learning.loop import Compute
from medsilo.learning.training import Training
from medsilo.mixing.mixers import Mixer
from medsilo.tasks.sources import DataSource
from medsilo.tasks.task import Task


@dataclass(frozen=True)
class ServerSide:
    """The sites, what came of the groups so far, and the server's own means. Mappings and sets are live views."""

    sites: Sequence[str]  # that train, in sorted order
    mixers: Mapping[str, Mixer]  # of the phases before, and of this phase's groups that were declared earlier
    joined: Mapping[str, Any]  # what every site joined with
    contributed: Callable[[], Set[str]]  # sites that have answered in a round
    task: Task
    training: Training
    seed: int
    compute: Compute
    data: DataSource | None  # the server's own
    stop: Callable[[], None]  # raises when the run was told to stop

    def sharing(self) -> Set[str]:
        """Return the sites that let each other have their personal models.

        The model of a site that was to train and never did is nobody's expert.
        """
        absent = set(self.sites) - self.contributed()
        return {site for site, answer in self.joined.items() if answer.shares and site not in absent}
