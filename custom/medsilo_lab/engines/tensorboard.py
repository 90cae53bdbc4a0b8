"""Write the scores and losses of a run to event files for TensorBoard (`--tensorboard`)."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round
from medsilo_server.flare.artifacts import metrics_after, metrics_of_round, tracked_numbers

OnRound = Callable[[Round], None]


def check_installed() -> None:
    """Raise MedsiloError if the package tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise MedsiloError("--tensorboard needs another package; install medsilo[tensorboard]")


@contextmanager
def event_files(folder: Path, metric: str, wanted: bool, then: OnRound = lambda line: None) -> Iterator[OnRound]:
    """Yield a function that writes each round of a run to the run's event files.

    If the run succeeds, the scores of the final model are written at the end of the `with` block.

    Args:
        folder: The run folder.
        metric: The name of the score.
        wanted: False to write event files only if the run is continued and has event files.
        then: Another function, which receives each round afterwards.
    """
    if not wanted and not (folder / paths.TENSORBOARD).is_dir():
        yield then
        return
    files = _EventFiles(folder, metric)

    def on_round(line: Round) -> None:
        files.add(line)
        then(line)

    try:
        yield on_round
        files.conclude()
    finally:
        files.close()


class _EventFiles:
    """The event files of a run, in a folder for each site. If a run is continued, the event files are deleted, and all
    rounds are written into new event files.
    """

    def __init__(self, folder: Path, metric: str) -> None:
        check_installed()
        self._folder, self._metric = folder, metric
        self._writers: dict[str, Any] | None = None  # writer of each site; None before the first event is written

    def add(self, line: Round) -> None:
        self._write_before(line.round)
        self._write(metrics_of_round(self._metric, line))

    def conclude(self) -> None:
        self._write_before(math.inf)
        if after := metrics_after(read_summary(self._folder)):
            self._write(after)

    def close(self) -> None:
        for writer in (self._writers or {}).values():
            writer.close()

    def _write_before(self, number: float) -> None:
        """At the first call, create the event files, and write all rounds before the round `number`."""
        if self._writers is None:
            self._writers = {}
            shutil.rmtree(self._folder / paths.TENSORBOARD, ignore_errors=True)
            for line in read_rounds(self._folder, growing=True):
                if line.round < number:
                    self._write(metrics_of_round(self._metric, line))

    def _write(self, line: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        assert self._writers is not None
        for site, numbers in tracked_numbers(line).items():
            if site not in self._writers:
                self._writers[site] = SummaryWriter(str(self._folder / paths.TENSORBOARD / site))
            for tag, number in numbers.items():
                self._writers[site].add_scalar(tag, number, line["round"])
            self._writers[site].flush()
