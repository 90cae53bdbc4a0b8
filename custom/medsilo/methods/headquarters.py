"""The server's side of a method that has to do something before a phase begins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from medsilo.learning.loop import Compute
from medsilo.learning.training import Training
from medsilo.mixing.mixers import Mixer
from medsilo.tasks.sources import DataSource
from medsilo.tasks.task import Task


@dataclass(frozen=True)
class Headquarters:
    """What a method finds at the server before a phase: what came of the phases before, and the server's own data."""

    sites: Sequence[str]
    mixers: Mapping[str, Mixer]
    task: Task
    training: Training
    seed: int
    compute: Compute
    data: DataSource | None  # the server's
    stop: Callable[[], None]  # raises when the run was told to stop
