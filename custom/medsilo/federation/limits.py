"""Limits that every hospital sets on a plan's demands, such as time and disk space."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import NoRoom, Refused, UnfitData
from medsilo.core.rounding import Resolution
from medsilo.core.text import size_text
from medsilo.federation.site_state import kept_states
from medsilo.learning.loop import steps_in
from medsilo.plan import Plan
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

MOST_MINUTES = 1440.0  # maximum minutes of work on one answer
MOST_DISK = 100 << 30  # maximum bytes of a study's folder
# minimum for the learning rate times the number of optimizer steps at a site, divided by the number of rounds
LEAST_LEARNING = 1e-5
# Disk space that all saved models need, and that a saved training state needs, each as a multiple of a model's size in
# float32.
MODELS, STATE = 2, 8 / 3


def check_limits(
    plan: Plan,
    settings: SiteSettings,
    parameters: int,
    train: int | None,
    free: int | None = None,
    patients: int | None = None,
) -> None:
    """Raise Refused if the plan demands more time, disk space or other resources than this hospital allows.

    The message of the error Refused is one line, which the site may send to the server.

    Args:
        train: the number of training cases; None if the site does not train
        free: free bytes on the disk that holds the site's results
        patients: the number of patients with training cases, if known
    """
    for one in asked_of(plan, parameters):
        if one.asked > one.most:
            raise Refused(
                f"the plan asks this hospital for {one.asked:.10g} {one.unit}, more than it allows ({one.most:.10g}); "
                f"{one.remedy}"
            )
    if free is not None and (needed := disk_needed(plan, parameters)) > free:
        raise NoRoom(
            f"this hospital's disk is full: {size_text(free)} are free for this study, and it needs "
            f"{size_text(needed)}; make room"
        )
    if train is None:
        return
    unit = settings.count_unit(plan.task.synthetic)
    if min(train, train if patients is None else patients) < unit:
        raise UnfitData(
            "this hospital has fewer training cases or patients than it trains with (min_patients_per_metric in its "
            f"{FILE_NAME}); bring more patients, or lower it there"
        )
    # The check of a plan's demands uses the rounded number of cases, so that the result does not disclose the exact
    # number.
    if learning_per_answer(plan, Resolution(unit=unit).count(train)) < LEAST_LEARNING:
        raise Refused(
            f"learning rate × steps is less than a hospital demands for each answer, {LEAST_LEARNING:g}; raise "
            "training.learning_rate or training.local_epochs"
        )


@dataclass(frozen=True)
class QuotaCheck:
    """A plan's demand for one resource, such as disk space, and the hospital's limit on this resource."""

    name: str
    asked: float
    most: float
    unit: str
    remedy: str


def disk_needed(plan: Plan, parameters: int) -> int:
    return int((MODELS + STATE * kept_states(plan.rounds)) * 4 * parameters)


def asked_of(plan: Plan, parameters: int) -> list[QuotaCheck]:
    minutes, disk = plan.participation.timeout / 60, disk_needed(plan, parameters) / 2**30
    return [
        QuotaCheck("time", minutes, MOST_MINUTES, "minutes for a round", "lower participation.timeout"),
        QuotaCheck("disk", disk, MOST_DISK / 2**30, "GiB for a study", "choose a smaller network"),
    ]


def learning_per_answer(plan: Plan, train: int) -> float:
    """Return the learning rate times a site's number of optimizer steps per round.

    The product of learning rate and steps bounds how far the weights can move, in units of the gradient's length. A
    study that hardly moves the weights would use the hospital only to score the initial model.
    """
    training = plan.training
    steps = training.steps_of_round(steps_in(train, training.batch_size))
    trained = sum(phase.rounds for phase in plan.course.phases if phase.trains)
    return training.learning_rate * steps * trained / plan.rounds


def check_disk(folder: Path) -> None:
    """Raise Refused if a study's folder exceeds the hospital's limit on disk space."""
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if taken > MOST_DISK:
        raise Refused(f"the study's folder is larger than a hospital allows ({size_text(MOST_DISK)})")


class Clock:
    def __init__(self) -> None:
        self.most = MOST_MINUTES
        self.started: float | None = None  # time at which the work on the present answer began

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time inside the `with` block as computing time of the current answer."""
        self.started = time.monotonic()
        try:
            yield
        finally:
            self.started = None

    def check(self) -> None:
        """Raise Refused if the work on this answer has exceeded the hospital's time limit."""
        if self.started is not None and time.monotonic() - self.started > 60 * self.most:
            raise Refused(f"this answer took longer than the {self.most:g} minutes that a hospital allows")
