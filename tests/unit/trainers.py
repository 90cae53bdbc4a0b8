"""Faulty trainers, which die, hang, fail or use too much memory, for tests/unit/federation/test_isolated.py."""

import os
import signal
import time

import torch

from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.site_context import SiteContext, UpdateCodec
from medsilo.federation.trainer import Trainer
from medsilo.learning.compute import Stop
from medsilo.schedule.phase import Phase
from medsilo.tasks.site_data import SiteData

WHEN = 2


class FragileTrainer(Trainer):
    """A trainer whose process is killed once within a round; the trainer in the next process works."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        loss = super().work(number, phase, stop)
        mark = self.context.folder.parents[2] / f"{self.context.site}-was-killed"
        if number == WHEN and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class HungryTrainer(Trainer):
    """A trainer that needs a gigabyte of memory in one round."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        if number == WHEN:
            torch.empty(2**30, dtype=torch.uint8)
        return super().work(number, phase, stop)


class TroubledTrainer(Trainer):
    """A trainer that hangs in round 1, ignores an abort in round 2, and raises an error with a patient's name in round
    3.
    """

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        while number == 1:
            stop()
            time.sleep(0.01)
        if number == 2:
            time.sleep(3600)
        raise ValueError("/data/patients/MUELLER_HANS_1961.nii.gz is truncated")


class DeafTrainer(Trainer):
    """A trainer that ignores an abort, because its batch never ends."""

    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        time.sleep(3600)
        return 0.0


def fragile(context: SiteContext, data: SiteData | None = None, codec: UpdateCodec | None = None) -> Participant:
    return participant_of(context, data, codec, FragileTrainer)


def hungry(context: SiteContext, data: SiteData | None = None, codec: UpdateCodec | None = None) -> Participant:
    return participant_of(context, data, codec, HungryTrainer)


def troubled(context: SiteContext, data: SiteData | None = None, codec: UpdateCodec | None = None) -> Participant:
    return participant_of(context, data, codec, TroubledTrainer)


def deaf(context: SiteContext, data: SiteData | None = None, codec: UpdateCodec | None = None) -> Participant:
    return participant_of(context, data, codec, DeafTrainer)
