"""What any hospital gives a plan at most, held against what the plan asks for before anything of it is made."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import NoRoom, Refused, Unfit
from medsilo.core.rounding import Resolution
from medsilo.core.text import size_text
from medsilo.federation.site_state import kept_states
from medsilo.learning.loop import steps_in
from medsilo.plan import Plan
from medsilo.site.party import FILE_NAME
from medsilo.site.settings import SiteSettings

MOST_MINUTES = 1440.0  # of work for one answer
MOST_DISK = 100 << 30  # bytes of a study's folder
LEAST_LEARNING = 1e-5  # learning rate × optimizer steps at a site for each answer with scores, on average
MODELS, STATE = 2, 8 / 3  # of a study's files at a site, in float32 models: the models, and a state with an optimizer's


def check_limits(
    plan: Plan,
    settings: SiteSettings,
    parameters: int,
    train: int | None,
    free: int | None = None,
    patients: int | None = None,
) -> None:
    """Raise Refused, in one line that may leave the site, where the plan asks for more than this hospital allows.

    parameters: of all networks; train: this site's training cases, None where it does not train; free: bytes on
    the disk of its results; patients: whose these cases are, where that is known.
    """
    for one in asked_of(plan, parameters):
        if one.asked > one.most:
            raise Refused(
                f"the plan asks this hospital for {one.asked:.10g} {one.unit}, more than it gives ({one.most:.10g}); "
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
        raise Unfit(
            "this hospital has fewer training cases or patients than it trains with (min_patients_per_metric in its "
            f"{FILE_NAME}); bring more patients, or lower it there"
        )
    if learning_per_answer(plan, Resolution(unit=unit).count(train)) < LEAST_LEARNING:  # of the rounded number
        raise Refused(
            f"learning rate × steps is less than a hospital demands for each answer, {LEAST_LEARNING:g}; raise "
            "training.learning_rate or training.local_epochs"
        )


@dataclass(frozen=True)
class QuotaCheck:
    """One thing that a plan asks of a hospital, against the most that it gives."""

    name: str
    asked: float
    most: float
    unit: str
    remedy: str


def disk_needed(plan: Plan, parameters: int) -> int:
    """Return the bytes that a study's files take at a site."""
    return int((MODELS + STATE * kept_states(plan.rounds)) * 4 * parameters)


def asked_of(plan: Plan, parameters: int) -> list[QuotaCheck]:
    """Return what a plan asks for that is known before anything runs."""
    minutes, disk = plan.participation.timeout / 60, disk_needed(plan, parameters) / 2**30
    return [
        QuotaCheck("time", minutes, MOST_MINUTES, "minutes for a round", "lower participation.timeout"),
        QuotaCheck("disk", disk, MOST_DISK / 2**30, "GiB for a study", "choose a smaller network"),
    ]


def learning_per_answer(plan: Plan, train: int) -> float:
    """Return learning rate × optimizer steps at a site with so many training cases, for each round's scores on average.

    Weights move by no more than that times the gradient's length (with Adam, in each weight by about that). A plan
    that moves them by next to nothing gets its own model back with scores of it: it asks and doesn't train.
    """
    training = plan.training
    steps = training.steps_of_round(steps_in(train, training.batch_size))
    trained = sum(phase.rounds for phase in plan.course.phases if phase.trains)
    return training.learning_rate * steps * trained / plan.rounds


def check_disk(folder: Path) -> None:
    """Raise Refused where a study's folder has grown over what a hospital gives."""
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if taken > MOST_DISK:
        raise Refused(f"the study's folder is larger than a hospital gives ({size_text(MOST_DISK)})")


class Clock:
    """The time that a site works for one answer."""

    def __init__(self) -> None:
        self.most = MOST_MINUTES
        self.started: float | None = None  # of the answer that is being made

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside as work."""
        self.started = time.monotonic()
        try:
            yield
        finally:
            self.started = None

    def check(self) -> None:
        """Raise Refused when this answer has had its time; to be asked often."""
        if self.started is not None and time.monotonic() - self.started > 60 * self.most:
            raise Refused(f"this answer took longer than the {self.most:g} minutes that a hospital gives")
