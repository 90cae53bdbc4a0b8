"""A hospital's own limits, held against what a plan asks for before anything of it is made."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import NoRoom, Refused
from medsilo.core.text import size_text
from medsilo.federation.site_state import kept_states
from medsilo.learning.loop import steps_in
from medsilo.plan import Plan
from medsilo.site.settings import FILE_NAME, Quotas, SiteSettings

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
    limits = settings.quotas
    for one in asked_of(plan, limits, parameters):
        if one.asked > one.most:
            raise Refused(
                f"the plan asks this hospital for {one.asked:.10g} {one.unit}, more than it allows ({_where(one.key)})"
            )
    if free is not None and (needed := disk_needed(plan, parameters)) > free:
        raise NoRoom(
            f"this hospital's disk is full: {size_text(free)} are free for this study, and it needs "
            f"{size_text(needed)}; make room"
        )
    if train is None:
        return
    if (learning := learning_per_answer(plan, train)) < LEAST_LEARNING:
        raise Refused(
            f"learning rate × steps is {learning:.3g} for each answer, a hospital demands {LEAST_LEARNING:g}; raise "
            "training.learning_rate or training.local_epochs"
        )
    if min(train, train if patients is None else patients) < settings.count_unit(plan.task.synthetic):
        raise Refused(
            "this hospital has fewer training cases or patients than it trains with (min_patients_per_metric in its "
            f"{FILE_NAME}); bring more patients, or lower it there"
        )


@dataclass(frozen=True)
class QuotaCheck:
    """One thing that a plan asks of a hospital, against the most that it gives."""

    key: str  # of limits
    asked: float
    most: float
    unit: str


def disk_needed(plan: Plan, parameters: int) -> int:
    """Return the bytes that a study's files take at a site."""
    return int((MODELS + STATE * kept_states(plan.rounds)) * 4 * parameters)


def asked_of(plan: Plan, limits: Quotas, parameters: int) -> list[QuotaCheck]:
    """Return what a plan asks for that is known before anything runs."""
    disk = disk_needed(plan, parameters) / 2**30
    return [
        QuotaCheck("round_minutes", plan.participation.timeout / 60, limits.round_minutes, "minutes for a round"),
        QuotaCheck("disk", disk, limits.disk, "GiB for a study"),
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


def check_disk(folder: Path, limits: Quotas) -> None:
    """Raise Refused where a study's folder has grown over what this hospital allows."""
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if taken > limits.disk * 2**30:
        raise Refused(f"the study's folder is larger than this hospital allows ({_where('disk')})")


class Clock:
    """The time that a site works for one answer."""

    def __init__(self, limits: Quotas) -> None:
        self.limits = limits
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
        if self.started is not None and time.monotonic() - self.started > 60 * self.limits.round_minutes:
            raise Refused(
                f"this answer took longer than the {self.limits.round_minutes:g} minutes that this hospital allows "
                f"({_where('round_minutes')})"
            )


def _where(key: str) -> str:
    return f"quotas.{key} in its {FILE_NAME}"
