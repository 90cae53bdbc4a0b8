"""The base of methods whose sites have models of their own and send those."""

from abc import abstractmethod
from copy import deepcopy

from medsilo.core.tensors import Modules
from medsilo.course.outcome import Outcome, OwnModels
from medsilo.course.phase import Blueprint, Group, Workbench, network
from medsilo.learning.personal import copy_into
from medsilo.methods.fedavg import Averaging


class MeanOfOwn(Averaging):
    """ "model" is w_k, which goes on from round to round. "global" is where the mean w̄ ← Σ p_k w_k arrives, and from
    where w_k leaves.
    """

    @property
    def outcome(self) -> Outcome:
        return OwnModels(common="global")

    def networks(self, build: Blueprint) -> Modules:
        model = build()
        return {"model": model, "global": deepcopy(model).requires_grad_(False)}

    def groups(self) -> tuple[Group, ...]:
        return (Group("global", network("global"), self.mean, title="own model", arrived=self.arrived),)

    def arrived(self, modules: Modules, came: bool) -> None:
        """Note at a site that w̄ has arrived, where a method has to know."""

    @abstractmethod
    def learn(self, bench: Workbench) -> float:
        """Train "model"; "global" holds w̄."""

    def work(self, bench: Workbench) -> float:
        """Train, and send what came of it."""
        loss = self.learn(bench)
        copy_into(bench.modules["global"], bench.modules["model"])
        return loss
