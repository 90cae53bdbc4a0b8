"""Show TensorBoard the numbers that sites tell the server, by name and round, and nothing else."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medsilo.runs.paths import TENSORBOARD
from medsilo.runs.record import Record
from medsilo.runs.schema import Round, Summary

LOG = logging.getLogger(__name__)
SERVER = "server"
OF_ROUNDS = ("train_loss", "validation", "validation_loss", "seconds")
Point = tuple[str, float, int]  # name, value, rounds that the model has gone through
Points = dict[str, list[Point]]  # of the server and of each site


def of_round(line: Round) -> Points:
    """Return a round as points; a number that a site withholds is none."""
    number, sites = line.round, line.sites
    # What is validated in a round is the model as it arrived.
    steps = {"validation": number - 1, "validation_loss": number - 1}
    found = {
        site: [
            (name, float(value), steps.get(name, number))
            for name in OF_ROUNDS
            if (value := getattr(own, name)) is not None
        ]
        for site, own in sites.items()
    }
    own = [("seconds", float(line.seconds or 0.0), number), ("sites", float(len(sites)), number)]
    own.append(("bytes_up", float(sum(site.bytes_up for site in sites.values())), number))
    own.append(("bytes_down", float(sum(site.bytes_down for site in sites.values())), number))
    return {SERVER: own, **found}


def of_end(summary: Summary) -> Points:
    """Return what is known when all rounds are over: the last validation, and the test of the selected model."""
    done, found = summary.rounds.done, {}
    for site, result in summary.sites.items():
        test, selected = result.test or {}, summary.selected.rounds.get(site) or 0
        last = result.validation[done] if len(result.validation) > done else None
        values = [("validation", last, done), ("test", summary.score(site), selected)]
        values.append(("test_loss", test.get("loss"), selected))
        found[site] = [(name, float(value), step) for name, value, step in values if value is not None]
    return found


class Tracker:
    """TensorBoard's event files, a folder for the server and each site.

    What a run that was killed had tracked may end anywhere, so one that goes on is tracked again from round 1.
    """

    def __init__(self, record: Record, kept: bool) -> None:
        self.record, self.begun, self.works = record, False, kept
        self.writers: dict[str, Any] = {}

    def round(self, line: Round) -> None:
        """Show a round that is over."""
        self._before(line.round)
        self.write(of_round(line))

    def end(self, summary: Summary) -> None:
        """Show what is known at the end."""
        self._before(summary.rounds.done + 1)
        self.write(of_end(summary))

    def _before(self, number: int) -> None:
        for line in () if self.begun else self.record.rounds():
            if line.round < number:
                self.write(of_round(line))
        self.begun = True

    def write(self, points: Points) -> None:
        """Keep points, until that fails once: no study ends for that."""
        try:
            for who, own in points.items() if self.works else ():
                self._write(who, own)
        except Exception as error:
            self.works, why = False, type(error).__name__
            LOG.warning("TensorBoard's files can't be written (%s) and stop here; rounds.jsonl has all numbers", why)

    def _write(self, who: str, own: list[Point]) -> None:
        if who not in self.writers:
            from torch.utils.tensorboard import SummaryWriter

            self.writers[who] = SummaryWriter(str(self.record.folder / TENSORBOARD / who))
        for name, value, step in own:
            self.writers[who].add_scalar(name, value, step)
        self.writers[who].flush()  # for who looks on while it runs


@contextmanager
def tracked(record: Record, kept: bool = True) -> Iterator[Tracker]:
    """Show a run in TensorBoard's files; nowhere where the run's folder is not kept."""
    shutil.rmtree(record.folder / TENSORBOARD, ignore_errors=True)
    tracker = Tracker(record, kept)
    try:
        yield tracker
    finally:
        for writer in tracker.writers.values():
            writer.close()
