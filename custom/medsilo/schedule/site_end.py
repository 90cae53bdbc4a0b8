"""Define the data that a method uses at a site to end a study."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from medsilo.core.rounding import Resolution
from medsilo.core.tensors import Modules
from medsilo.learning.compute import Compute
from medsilo.schedule.outcome import Part
from medsilo.tasks.task import Task


@dataclass(frozen=True)
class SiteEnd:
    """The data from which a method makes its outcome at a site."""

    plan: Any  # a medsilo.plan.Plan, which this package can't import
    site: str
    modules: Modules  # the networks, which contain the delivered tensors
    folder: Path  # the site's folder in the study's run
    task: Task
    compute: Compute
    validation: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # yields each validation case once, in order
    suppressed: Collection[Part]  # the parts of the data that have too few cases to send any score
    resolution: Mapping[str, Resolution]  # for each part of the data: the rounding of means and counts
    stop: Callable[[], None]
