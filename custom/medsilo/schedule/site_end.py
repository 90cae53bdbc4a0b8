"""Define the data of a site with which a method ends a study."""

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
    """A site's data with which a method makes its outcome."""

    plan: Any  # a medsilo.plan.Plan, which this package can't import
    site: str
    modules: Modules  # the networks with the delivered tensors
    folder: Path  # the site's folder in the study's run
    task: Task
    compute: Compute
    validation: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # yields each validation case once, in order
    suppressed: Collection[Part]  # parts with too few cases for any number
    resolution: Mapping[str, Resolution]  # the rounding of numbers over each part
    stop: Callable[[], None]
