"""The base of methods whose server finds out in every round how much each hospital counts."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from medsilo.course.algorithm import BY_ITSELF, Algorithm
from medsilo.course.phase import Group, ServerSide
from medsilo.methods.server_step import other_tensors, trained_weights
from medsilo.mixing.late import LateMean, Shares, at_most


class WeighingMethod(Algorithm):
    """θ ← Σ_k a_k θ_k, also of running statistics, with weights that the server works out once all have answered."""

    protocols: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {**BY_ITSELF, "algorithm.largest_share": 1.0}}

    largest_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="the most that one hospital may count for, whatever it sends or says; what is cut off goes to the "
        "others. The paper has no bound, which is 1",
    )

    def groups(self) -> tuple[Group, ...]:
        """Return trained weights, and beside them what is averaged with the same weights."""
        model = Group(
            "model",
            trained_weights,
            lambda server: LateMean(lambda mean: at_most(self.weigh(server, mean), self.largest_share)),
            undefended=f"mixing: how much a hospital counts is what {self.name} finds out, so a robust rule or a cap "
            "can't take its mean's place; lower algorithm.largest_share, or use fedavg",
        )
        buffers = Group(
            "buffers",
            other_tensors,
            lambda server: LateMean(lambda mean: server.mixers["model"].shares),
            title="running statistics",
            undefended=model.undefended,
        )
        return model, buffers

    @abstractmethod
    def weigh(self, server: ServerSide, mean: LateMean) -> Shares:
        """Return the weights of the sites that answered."""

    def cautions(self, sites: Sequence[str]) -> list[str]:
        if self.largest_share * len(sites) > 1:
            return []
        return [
            f"algorithm.largest_share {self.largest_share:g} leaves {len(sites)} hospitals no choice: all count alike"
        ]
