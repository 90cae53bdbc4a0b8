"""What methods with two networks at a site share: one that all sites train, and the site's own."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy

from medsilo.learning.loop import Lesson
from medsilo.methods.base import Blueprint, Groups, Modules, Workbench
from medsilo.methods.fedavg import Averaging


class Personal(Averaging):
    """ "global" is the network w that travels and that the lead gets; "model" is the site's own, which it ends with.

    Both begin with the same weights. The site's own never leaves it, running statistics of batch norm included.
    """

    travels = "shared model"

    def networks(self, build: Blueprint) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model)}

    def shared(self, modules: Modules, phase: str) -> Groups:
        return {"global": modules["global"].state_dict()}

    @abstractmethod
    def learning(self, bench: Workbench) -> AbstractContextManager[Sequence[Lesson]]:
        """What the site's networks learn from each batch of a round, while the block lasts."""

    def train(self, bench: Workbench, phase: str) -> float:
        with self.learning(bench) as lessons:
            return bench.train(*lessons)

    def common(self, modules: Modules, phase: str) -> Modules:
        return {**modules, "model": modules["global"]}
