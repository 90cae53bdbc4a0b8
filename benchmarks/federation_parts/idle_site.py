"""Our side of the benchmark: the real executor and participant, whose training and evaluation take no time.

Carried in the benchmark job's app/custom.
"""

from torch.utils.data import Dataset

from medsilo.federation.participant import Participant
from medsilo.flare.executor import MedsiloExecutor
from medsilo.learning.loop import Stop


class IdleParticipant(Participant):
    """Receives, keeps, gives back: everything but the work."""

    def _train(self, number: int, phase: str, stop: Stop) -> float:
        return 0.0

    def _evaluate(self, part: Dataset, stop: Stop) -> tuple[float, float, int]:
        return 0.0, 0.5, len(part)  # type: ignore[arg-type]


class IdleExecutor(MedsiloExecutor):
    """Answers like any site, at once."""

    participant_class = IdleParticipant
