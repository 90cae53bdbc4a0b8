"""Let a site's computation alternate with a user's training script, in a thread that waits while the script trains."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from medsilo.learning.loop import ObjectiveFunction, Step, TrainStep, Watch
from medsilo.runs.messages import StudyMessage
from medsilo.schedule.train_context import TrainContext


@dataclass(frozen=True)
class Turn:
    """The part of a round in which either the script or the method trains one network; the method trains batch by
    batch.
    """

    name: str
    by_script: bool  # True if the script trains the network in the script's own loop
    # sets the network to training mode and returns its training step; None if the script only scores a model
    make: Callable[[], TrainStep] | None

    @cached_property
    def train_step(self) -> TrainStep:
        assert self.make
        return self.make()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.train_step(inputs, targets)


@dataclass(frozen=True)
class ScriptContext(TrainContext):
    hand_over: Callable[[Turn], float] = field(kw_only=True)

    def train_step(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        by_script = objective is None and step is None
        return Turn(name, by_script, partial(super().train_step, name, objective, step))

    def train(self, *train_steps: TrainStep, share: float = 1.0) -> float:
        train_steps = train_steps or (self.train_step(),)
        turns = [train_step for train_step in train_steps if isinstance(train_step, Turn) and train_step.by_script]
        watches = [train_step for train_step in train_steps if isinstance(train_step, Watch)]
        if len(turns) + len(watches) < len(train_steps):
            return super().train(*train_steps, share=share)
        losses = [self.hand_over(turn) for turn in turns]
        if watches:
            for inputs, targets in self.cases.in_order():
                for watch in watches:
                    watch(inputs, targets)
        return losses[0] if losses else math.nan


class Work:
    """The computation of an answer, which runs in a separate thread and waits while the script trains."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Turn | Callable[[], Any] | StudyMessage | BaseException | None]
        self.done: SimpleQueue[Any]
        self.now: Turn | None = None  # the network that the script should train at present, or None
        self.sends = False  # True if the script should call `send` next
        self.answer: StudyMessage | None = None

    def begin(self, make: Callable[[], StudyMessage]) -> None:
        self.asked, self.done = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self._run, args=(make,), name="medsilo-site", daemon=True).start()
        self._wait()

    def _run(self, make: Callable[[], StudyMessage]) -> None:
        try:
            self.asked.put(make())
        except BaseException as error:
            self.asked.put(error)

    def hand_over(self, item: Turn | Callable[[], Any] | None) -> Any:
        """Hand the script a network to train or a function to call; wait until the script has done so, and return the
        result.

        Args:
            item: the network or the function; None to wait until the script calls `send`
        """
        self.asked.put(item)
        return self.done.get()

    def go_on(self, done: Any = None) -> None:
        self.done.put(done)
        self._wait()

    def _wait(self) -> None:
        asked = self.asked.get()
        while callable(asked) and not isinstance(asked, Turn):
            self.done.put(asked())
            asked = self.asked.get()
        if isinstance(asked, BaseException):
            raise asked
        self.now = asked if isinstance(asked, Turn) else None
        self.answer = asked if isinstance(asked, StudyMessage) else None
        self.sends = asked is None
