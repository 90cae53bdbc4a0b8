"""How a site's work and a user's own script take turns: the work waits in a thread until the script has trained."""

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
    """One network's part of a round: the script trains it, or a method does, batch by batch."""

    name: str
    by_script: bool  # whether the script's loss and a step of its optimizer are all that there is to it
    make: Callable[[], TrainStep]  # sets a network to training, also the layers that the script has not

    @cached_property
    def lesson(self) -> TrainStep:
        return self.make()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.lesson(inputs, targets)


@dataclass(frozen=True)
class ScriptContext(TrainContext):
    """The tools of a method at a site that a script trains."""

    hand_over: Callable[[Turn], float] = field(kw_only=True)

    def lesson(
        self, name: str = "model", objective: ObjectiveFunction | None = None, step: Step | None = None
    ) -> TrainStep:
        by_script = objective is None and step is None
        return Turn(name, by_script, partial(super().lesson, name, objective, step))

    def train(self, *lessons: TrainStep, share: float = 1.0) -> float:
        lessons = lessons or (self.lesson(),)
        turns = [lesson for lesson in lessons if isinstance(lesson, Turn) and lesson.by_script]
        watches = [lesson for lesson in lessons if isinstance(lesson, Watch)]
        if len(turns) + len(watches) < len(lessons):
            return super().train(*lessons, share=share)
        losses = [self.hand_over(turn) for turn in turns]
        if watches:
            for inputs, targets in self.data():
                for watch in watches:
                    watch(inputs, targets)
        return losses[0] if losses else math.nan


class Work:
    """An answer in the making, in a thread of its own, which waits where the script has something to do."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Turn | Callable[[], Any] | StudyMessage | BaseException | None]
        self.done: SimpleQueue[Any]
        self.now: Turn | None = None  # the network whose turn it is
        self.sends = False  # whether the script's turn is to send
        self.answer: StudyMessage | None = None

    def begin(self, make: Callable[[], StudyMessage]) -> None:
        """Begin, and wait until the script has something to do."""
        self.asked, self.done = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self._run, args=(make,), name="medsilo-site", daemon=True).start()
        self._wait()

    def _run(self, make: Callable[[], StudyMessage]) -> None:
        try:
            self.asked.put(make())
        except BaseException as error:
            self.asked.put(error)

    def hand_over(self, what: Turn | Callable[[], Any] | None) -> Any:
        """Let the script train a network, call a function, or, of None, send; returns what came of it."""
        self.asked.put(what)
        return self.done.get()

    def go_on(self, done: Any = None) -> None:
        """Go on: the script has done what it was asked for."""
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
