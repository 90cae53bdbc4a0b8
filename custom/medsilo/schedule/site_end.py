"""Define the data from which a site creates a method's outcome at the end of a study."""

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
    plan: Any  # a medsilo.plan.Plan; the package medsilo.schedule can't import medsilo.plan
    site: str
    modules: Modules  # the networks, which contain the delivered tensors
    folder: Path  # the site's folder within the run's folder
    task: Task
    compute: Compute
    # a function that yields each validation case once, in order
    validation: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    suppressed: Collection[Part]  # the parts of the data (validation or test) that have too few cases to send any score
    resolution: Mapping[str, Resolution]  # for each part of the data, the rounding of means and counts
    stop: Callable[[], None]
