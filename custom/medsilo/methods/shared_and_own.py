"""The base of methods with two networks at a site: one that all sites train, and the site's own."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy

from medsilo.core.tensors import Modules
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Blueprint, Group, Workbench, network
from medsilo.learning.loop import Lesson
from medsilo.methods.fedavg import Averaging


class SharedAndOwn(Averaging):
    """ "global" is the network w that travels and that the lead gets; "model" is the site's own, which it ends with.

    Both begin with the same weights. The site's own never leaves it, running statistics of batch norm included.
    """

    @property
    def outcome(self) -> Outcome:
        return OwnModels(common="global")

    def networks(self, build: Blueprint) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model)}

    def groups(self) -> tuple[Group, ...]:
        return (Group("global", network("global"), self.mean, title="shared model"),)

    @abstractmethod
    def learning(self, bench: Workbench) -> AbstractContextManager[Sequence[Lesson]]:
        """Return what the site's networks learn from each batch of a round, while the block lasts."""

    def work(self, bench: Workbench) -> float:
        """Train both networks in one pass over the data."""
        with self.learning(bench) as lessons:
            return bench.train(*lessons)
