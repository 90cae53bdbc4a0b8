"""Change generated hospitals so that they differ from each other with a given strength.

Differences in appearance use the task's `shift`. Differences in structures or sensors change the generated task: how
many hospitals label the other structure, or how far apart the families of sensors are.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from medsilo.tasks.synthetic import activity, prostate
from medsilo.tasks.synthetic.activity import COMMON, FAMILIES, Sensor
from results.pages import ANATOMY, SENSORS, Shift


def apart(family: Sensor, power: float) -> Sensor:
    """Return the sensors of a family after multiplying their distance from the common sensors by `power`."""

    def moved(common: float, own: float) -> float:
        return common + power * (own - common)

    return Sensor(
        tuple(map(moved, COMMON.gains, family.gains)),
        tuple(map(moved, COMMON.offsets, family.offsets)),
        moved(COMMON.noise, family.noise),
        moved(COMMON.rate, family.rate),
    )


def differing(shift: Shift | None) -> AbstractContextManager[Any]:
    if shift and shift.kind == ANATOMY:
        return patch.object(prostate, "DARK_ORGANS", tuple(range(int(shift.power))))
    if shift and shift.kind == SENSORS:
        return patch.object(activity, "FAMILIES", tuple(apart(family, shift.power) for family in FAMILIES))
    return nullcontext()
