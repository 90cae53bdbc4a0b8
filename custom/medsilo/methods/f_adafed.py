"""f-AdaFed: AdaFed without a pre-trained model and without any shared data (Chen et al. 2022)."""

from collections.abc import Sequence
from typing import Literal

from medsilo.core.errors import PlanError
from medsilo.core.tensors import Modules
from medsilo.learning.layers import batch_norm_layers, batch_norm_names
from medsilo.learning.statistics import running_statistics
from medsilo.methods.adafed import StatisticsMixture
from medsilo.methods.bases import require
from medsilo.schedule.phase import Phase
from medsilo.schedule.train_context import TrainContext


class FAdaFed(StatisticsMixture):
    """FedBN with equal weights in the first R // 2 rounds, then AdaFed with W from batch norm's running statistics.

    The last of the first rounds is phase "measure": the running statistics travel beside the model.
    """

    title = "f-AdaFed"
    made_anew = frozenset({"statistics"})

    name: Literal["f-adafed"] = "f-adafed"

    def phases(self, rounds: int) -> Sequence[Phase]:
        first = rounds // 2
        if first < 1:
            raise PlanError("training.rounds: f-adafed averages in the first half of the rounds; give 2 or more")
        return [
            Phase("average", first - 1, self.groups()),
            Phase("measure", 1, (*self.groups(), self.statistics()), self.train_and_measure),
            Phase("train", rounds - first, self.groups()),
        ]

    def check(self, modules: Modules) -> None:
        model = modules["model"]
        require(
            batch_norm_names(model), self.name, "batch norm", "give it batch norm (network.norm=batch) or choose fedavg"
        )
        if any(layer.running_mean is None for layer in batch_norm_layers(model)):
            raise PlanError(f"algorithm.name: {self.name} needs batch norm's running statistics; choose adafed")

    def train_and_measure(self, bench: TrainContext) -> float:
        """Train, then hold batch norm's running statistics."""
        loss = bench.train()
        self.hold(bench, running_statistics(bench.modules["model"]))
        return loss
