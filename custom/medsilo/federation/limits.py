"""A hospital's own limits, held against what a plan asks for before anything of it is made."""

import math
import shutil
from pathlib import Path

from medsilo.core.errors import Refused
from medsilo.plan import Plan
from medsilo.site.settings import FILE_NAME, SiteSettings

KEPT = 10  # float32 models' worth of files that a study keeps at a site: three states with an optimizer's, two models


def check_limits(plan: Plan, settings: SiteSettings, parameters: int, train: int, free: int | None = None) -> None:
    """Raise Refused, in one line that may leave the site, where the plan asks for more than this hospital allows.

    parameters: of all networks; train: this site's training cases; free: bytes on the disk of its results.
    """
    limits, training = settings.limits, plan.training
    values = training.batch_size * math.prod(plan.task.shape or (1,))
    hours = plan.rounds * plan.participation.timeout / 3600
    kept = KEPT * 4 * parameters / 2**30
    too_much = (
        ("round_minutes", plan.participation.timeout / 60, limits.round_minutes, "minutes for a round"),
        ("study_hours", hours, limits.study_hours, "hours for all rounds"),
        ("parameters", parameters, limits.parameters, "parameters"),
        ("batch_values", values, limits.batch_values, "values in a batch"),
        ("disk_free", kept, None if free is None else free / 2**30 - limits.disk_free, "GiB of its disk"),
    )
    for key, asked, most, unit in too_much:
        if most is not None and asked > most:
            raise Refused(f"the plan asks this hospital for {asked:.10g} {unit}, more than it allows ({_where(key)})")
    if training.learning_rate < limits.least_learning_rate:
        rate = f"training.learning_rate {training.learning_rate:g}"
        raise Refused(
            f"{rate} learns next to nothing, which this hospital does not answer ({_where('least_learning_rate')})"
        )
    if train < limits.least_cases:
        raise Refused(f"this hospital has fewer training cases than it trains with ({_where('least_cases')})")


def _where(key: str) -> str:
    return f"limits.{key} in its {FILE_NAME}"


def free_disk(folder: Path) -> int:
    """The free bytes on the disk of a folder that may not be there yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
