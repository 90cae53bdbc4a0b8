"""FedSM-extra (Xu et al. 2022, Sec. 3.1.2): the models first, then a selector that learns which of them is right."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import PlanError
from medsilo.learning.loop import LossFunction
from medsilo.learning.training import Training
from medsilo.methods.base import Choice, Groups, Modules, Phase, Workbench
from medsilo.methods.fedsm import FedSM, outcome
from medsilo.methods.selecting import Selecting


class Afterwards(FedSM):
    """Global and personal models as in FedSM; when they are done, hospitals get those of the others that agreed, and
    train a selector among all K + 1 alone. Output 0 stands for the global model.
    """

    travels = "global model, selector; personal models to all sites"
    ending = None
    passing = frozenset()
    protocols: ClassVar[dict[str, Any]] = {"paper": Selecting.literal}

    personal_method: None = None
    selector_rounds: int | None = Field(
        None,
        ge=1,
        description="how many of `training.rounds` train the selector, after the models; `null`: a third, as in the "
        "paper",
    )

    def phases(self, training: Training) -> Sequence[Phase]:
        last = self.selector_rounds or max(1, training.rounds // 3)
        if last >= training.rounds:
            raise PlanError(
                f"training.rounds: {self.name} trains models before {last} rounds of the selector; give more"
            )
        return [Phase("train", training.rounds - last), Phase("select", last)]

    def outputs(self, sites: int) -> int:
        return 1 + sites

    # What is shared
    def shared(self, modules: Modules, phase: str) -> Groups:
        return self.of_models(modules) if phase == "train" else self.of_selector(modules)

    def given(self, modules: Modules, phase: str) -> Groups:
        return outcome(modules) | self.of_selector(modules) if phase == "select" else self.of_models(modules)

    # What is trained
    def train(self, bench: Workbench, phase: str) -> float:
        if phase == "train":
            with self.learning_models(bench) as lessons:
                return bench.train(*lessons)
        frozen = [bench.modules["global"], *bench.modules["experts"].children()]
        for model in frozen:
            model.eval()

        def objective(selector: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad():
                outputs = [model(inputs) for model in frozen]
            return self.objective(selector(inputs), outputs, targets, bench.loss)

        with self.learning_selector(bench, objective) as selector:
            return bench.train(selector)

    @abstractmethod
    def objective(self, scores: Tensor, outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
        """What the selector minimises; scores: [B, K + 1]; outputs: of the global model and all personal ones."""


class FedSMExtra(Afterwards):
    """The selector learns to name the best of all K + 1 models; at the end the most likely one answers."""

    title = "FedSM-extra"

    name: Literal["fedsm-extra"] = "fedsm-extra"  # type: ignore[assignment]

    def choice(self, modules: Modules) -> Choice:
        return Choice(self.selector_network(modules["model"]), "argmax")

    def objective(self, scores: Tensor, outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
        return functional.cross_entropy(scores, best_of(outputs, targets, loss))


def best_of(outputs: Sequence[Tensor], targets: Tensor, loss: LossFunction) -> Tensor:
    """Eq. 1 repaired: argmin_k L(h_k(x), y) for every case, of equal ones the smallest k; [B]."""
    losses = [[loss(output[i : i + 1], targets[i : i + 1]) for i in range(len(targets))] for output in outputs]
    return torch.stack([torch.stack(row) for row in losses]).argmin(0)
