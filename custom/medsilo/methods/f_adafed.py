"""f-AdaFed: AdaFed without a pre-trained model and without any shared data (Chen et al. 2022)."""

from collections.abc import Sequence
from typing import Literal

from medsilo.core.errors import PlanError
from medsilo.learning.layers import batch_norm_layers, batch_norm_names
from medsilo.learning.statistics import running_statistics
from medsilo.learning.training import Training
from medsilo.methods.base import Groups, Modules, Phase, Workbench, require
from medsilo.methods.similar import Similar


class FAdaFed(Similar):
    """FedBN with equal weights in the first R // 2 rounds, then AdaFed with W from batch norm's running statistics.

    The last of the first rounds is phase "measure": the running statistics travel beside the model.
    """

    title = "f-AdaFed"
    travels = "model without batch norm; statistics"
    passing = frozenset({"statistics"})

    name: Literal["f-adafed"] = "f-adafed"

    def phases(self, training: Training) -> Sequence[Phase]:
        first = training.rounds // 2
        if first < 1:
            raise PlanError("training.rounds: f-adafed averages in the first half of the rounds; give 2 or more")
        weighted = training.rounds - first
        stretch = min(self.refresh or weighted, weighted)
        phases = [Phase("average", first - 1), Phase("measure", 1)]
        while weighted > stretch:
            phases += [Phase("train", stretch - 1), Phase("measure", 1)]
            weighted -= stretch
        return [*phases, Phase("train", weighted)]

    def check(self, modules: Modules) -> None:
        model = modules["model"]
        require(batch_norm_names(model), self.name, "batch norm", "set network.norm=batch or choose fedavg")
        if any(layer.running_mean is None for layer in batch_norm_layers(model)):
            raise PlanError(f"algorithm.name: {self.name} needs batch norm's running statistics; choose adafed")

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        trained = self.trained(modules)
        return trained if phase != "measure" else trained | {"statistics": modules["statistics"].state_dict()}

    def given(self, modules: Modules, phase: str) -> Groups:
        return self.trained(modules)

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        loss = bench.train()
        if phase == "measure":
            self.measure(bench, running_statistics(bench.modules["model"]))
        return loss
