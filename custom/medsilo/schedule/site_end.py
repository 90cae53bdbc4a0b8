"""What an outcome finds at a site."""

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
    """A site, as an outcome finds it."""

    plan: Any  # the study's; plans stand above this room
    site: str
    modules: Modules  # with what was delivered
    folder: Path  # the site's own in the study
    task: Task
    compute: Compute
    validation: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # the cases once, in their order
    suppressed: Collection[Part]  # parts with too few cases to tell anything of
    resolution: Mapping[str, Resolution]  # how coarsely numbers over a part are rounded
    stop: Callable[[], None]
