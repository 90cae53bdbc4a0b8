"""A site's word about what it does at the moment, in a small file of its own folder. It never leaves the site."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from medsilo.core.files import write_passing
from medsilo.core.lifeline import most_held
from medsilo.runs import paths
from medsilo.runs.schema import Deed, Doing

PAUSE = 0.25  # seconds between two words; an answer that takes less is made without any


class NowFile:
    """A site's progress with an answer: the work that goes on, and the share of its batches that is done."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, device: str = "") -> None:
        self._device = device
        self._file, self._clock = folder / paths.NOW, clock
        self._asked = ("", 0)
        self._deed: Deed = "starting"
        self._steps = self._made = 0
        self._told = clock()

    @contextmanager
    def answering(self, task: str, number: int) -> Iterator[None]:
        """Inside, a site makes its answer to this question; an error that ends it is told as a refusal."""
        self._asked, self._told = (task, number), self._clock()
        said = self._told
        self._deed, self._steps = "starting", 0
        try:
            yield
        except Exception:
            self.begin("refused")
            self._tell()
            raise
        if task == "test":
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            return
        self.begin("sending")
        if self._told != said:  # else whoever watches has seen nothing of this answer
            self._tell()

    def begin(self, deed: Deed, steps: int = 0) -> None:
        """Begin another kind of work. steps: the batches that it has, where that is known."""
        self._deed, self._steps, self._made = deed, steps, 0

    def step(self) -> None:
        """A batch begins."""
        if self._clock() - self._told >= PAUSE:
            self._tell()
        self._made += 1

    def _tell(self) -> None:
        self._told = self._clock()
        share = min(self._made / self._steps, 1.0) if self._steps else None
        task, number = self._asked
        told = Doing(
            task=task,
            round=number,
            at=time.time(),
            deed=self._deed,
            share=share,
            memory=float(most_held()),
            device=self._device,
        )
        write_passing(self._file, told.as_json())
