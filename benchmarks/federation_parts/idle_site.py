"""Our side of the benchmark: the real executor and participant, whose training and evaluation take no time.

Carried in the benchmark job's app/custom.
"""

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.participant import Participant
from medsilo.federation.trainer import Trainer
from medsilo.flare.executor import MedsiloExecutor
from medsilo.learning.compute import Compute, Stop
from medsilo.schedule.phase import Phase
from medsilo.tasks.metrics import Measures


class IdleTrainer(Trainer):
    """Everything but the work."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        return 0.0


class IdleEvaluation(Evaluation):
    """Makes up the scores; for the test, which measures more than the metric, from its first case."""

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        cases: int = len(part)  # type: ignore[arg-type]
        measures = {self.task.goal.metric: torch.full((1,), 0.5, dtype=torch.float64)}
        if measuring is not None:
            _, _, measures = super().evaluate(Subset(part, [0]), stop, model, measuring)
        return 0.0, 0.5, {name: values.expand(cases, *values.shape[1:]) for name, values in measures.items()}


class IdleParticipant(Participant):
    """Receives, keeps, gives back."""

    trainer_kind = IdleTrainer

    def evaluates(self, compute: Compute, protected: bool) -> IdleEvaluation:
        return IdleEvaluation(self.place, self.data, compute, protected)


class IdleExecutor(MedsiloExecutor):
    """Answers like any site, at once."""

    participant_class = IdleParticipant
