"""Participants that die, eat, hang or fail in their processes, as a hospital's would; `tests/unit/test_isolated.py`."""

import os
import signal
import time

import torch

from medsilo.federation.participant import Participant
from medsilo.federation.trainer import Trainer
from medsilo.learning.compute import Stop
from medsilo.schedule.phase import Phase

WHEN = 2  # the round in which it happens


class FragileTrainer(Trainer):
    """Killed in the middle of a round, once: what the next process does is another matter."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        loss = super().work(number, phase, stop)
        mark = self.place.folder.parents[2] / f"{self.place.site}-was-killed"  # beside the run
        if number == WHEN and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class HungryTrainer(Trainer):
    """Needs a gigabyte in one round."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        if number == WHEN:
            torch.empty(2**30, dtype=torch.uint8)
        return super().work(number, phase, stop)


class TroubledTrainer(Trainer):
    """Trains for ever in the first round, hears nothing in the second, and fails with a patient's name in the third."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        while number == 1:
            stop()
            time.sleep(0.01)
        if number == 2:
            time.sleep(3600)
        raise ValueError("/data/patients/MUELLER_HANS_1961.nii.gz is truncated")


class DeafTrainer(Trainer):
    """Hears nothing in a batch that never ends."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        time.sleep(3600)
        return 0.0


class Fragile(Participant):
    trainer_kind = FragileTrainer


class Hungry(Participant):
    trainer_kind = HungryTrainer


class Troubled(Participant):
    trainer_kind = TroubledTrainer


class Deaf(Participant):
    trainer_kind = DeafTrainer
