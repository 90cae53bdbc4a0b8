"""Define medsilo's site in the benchmark: it has the real executor and participant, but neither trains nor evaluates.

The benchmark's job contains this file in app/custom.
"""

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.participant import Participant, parts_of
from medsilo.federation.site_context import SiteContext, UpdateCodec
from medsilo.federation.trainer import Trainer
from medsilo.flare.executor import MedsiloExecutor
from medsilo.learning.compute import Stop
from medsilo.schedule.phase import Phase
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import SiteData


class IdleTrainer(Trainer):
    """Return at once, and leave the received model unchanged."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        return 0.0


class IdleEvaluation(Evaluation):
    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        cases: int = len(part)  # type: ignore[arg-type]
        measures = {self.task.goal.metric: torch.full((1,), 0.5, dtype=torch.float64)}
        if measuring is not None:
            _, _, measures = super().evaluate(Subset(part, [0]), stop, model, measuring)
        return 0.0, 0.5, {name: values.expand(cases, *values.shape[1:]) for name, values in measures.items()}


def idle_participant(
    context: SiteContext, data: SiteData | None = None, codec: UpdateCodec | None = None
) -> Participant:
    """Return a site that sends each received model back unchanged."""
    return Participant(context, parts_of(context, data, IdleTrainer, IdleEvaluation), codec)


class IdleExecutor(MedsiloExecutor):
    participant = staticmethod(idle_participant)
