"""Our side of the benchmark: the real executor and participant, whose training and evaluation take no time.

Carried in the benchmark job's app/custom.
"""

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from medsilo.course.phase import Phase
from medsilo.federation.evaluation import Measure
from medsilo.federation.participant import Participant
from medsilo.flare.executor import MedsiloExecutor
from medsilo.learning.loop import Stop
from medsilo.tasks.metrics import Measures


class IdleParticipant(Participant):
    """Receives, keeps, gives back: everything but the work."""

    def _train(self, number: int, phase: Phase, stop: Stop) -> float:
        return 0.0

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measure: Measure | None = None
    ) -> tuple[float, float, Measures]:
        """Make up the scores; for the test, which measures more than the metric, from its first case."""
        cases: int = len(part)  # type: ignore[arg-type]
        measures = {self.plan.task.metric: torch.full((1,), 0.5, dtype=torch.float64)}
        if measure is not None:
            _, _, measures = super().evaluate(Subset(part, [0]), stop, model, measure)
        return 0.0, 0.5, {name: values.expand(cases, *values.shape[1:]) for name, values in measures.items()}


class IdleExecutor(MedsiloExecutor):
    """Answers like any site, at once."""

    participant_class = IdleParticipant
