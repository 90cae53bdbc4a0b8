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
    """AdaFed without a pre-trained network, in which the mixing weights W follow from running statistics of batch norm.

    The first R // 2 rounds are FedBN with equal weights, and the remaining rounds are AdaFed. In the last round of
    FedBN, which is phase "measure", each site also sends its running statistics.
    """

    title = "f-AdaFed"
    sends = "model without norms, feature statistics; the statistics are sent once"
    suits = "groups of similar hospitals, if no cases are public"
    made_anew = frozenset({"statistics"})

    name: Literal["f-adafed"] = "f-adafed"

    def phases(self, rounds: int) -> Sequence[Phase]:
        first = rounds // 2
        if first < 1:
            raise PlanError("training.rounds: f-adafed averages in the first half of the rounds; set 2 or more rounds")
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

    def train_and_measure(self, context: TrainContext) -> float:
        loss = context.train()
        self.hold(context, running_statistics(context.modules["model"]))
        return loss
