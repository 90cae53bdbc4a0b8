"""Round numbers over a group of patients before they leave, so that they reveal no single patient."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

STEPS = (1, 2, 5)  # times a power of ten


def step_of_at_least(width: float) -> float:
    """Return the least of 1, 2, 5, 10, ..., 0.5, 0.2, 0.1, ... that is no smaller than this; 0 for 0."""
    if width <= 0:
        return 0.0
    power = math.floor(math.log10(width))
    found = (first * 10.0**tens for tens in (power - 1, power, power + 1) for first in STEPS)
    return float(f"{next(step for step in found if step >= width * (1 - 1e-9)):.1e}")


@dataclass(frozen=True)
class Resolution:
    """The steps to which numbers over one group of patients are rounded."""

    weight: float = 0.0  # the greatest share of the cases that one patient has
    patients: int = 0  # who together move a rounded mean by one step at most; 0: means leave exactly
    unit: int = 1  # counts are multiples of so many patients
    usual: int = 1  # cases that each patient counts for, whatever number the patient has
    size: int = 0  # number of patients; of cases where numbers leave exactly

    @classmethod
    def over(cls, names: Sequence[str], patients: int, unit: int) -> "Resolution":
        """Return the resolution of a group of cases. names: the patient of each."""
        each = sorted(Counter(names).values()) or [0]
        told = cls(each[-1] / max(len(names), 1), patients, unit, size=len(names))
        if told.exact:
            return told
        usual = int(float(f"{each[(len(each) - 1) // 2]:.0e}"))  # one patient seldom moves a median's first digit
        return replace(told, usual=usual, size=len(set(names)))

    def among(self, share: float) -> "Resolution":
        """Return the resolution of this share of the cases, where one patient counts for more."""
        return replace(self, weight=min(1.0, self.weight / share))

    @property
    def exact(self) -> bool:
        """Return whether numbers leave exactly."""
        return not self.patients and self.unit == 1

    def step(self, low: float, high: float) -> float:
        """Return the step of a mean over values that lie between these."""
        return step_of_at_least(self.patients * self.weight * (high - low))

    def mean(self, value: float, low: float, high: float) -> float:
        """Round a mean to a whole number of steps above `low`, and not above `high`."""
        step = self.step(low, high)
        if not step or math.isnan(value):
            return value
        steps = round((min(max(value, low), high) - low) / step)
        return min(float(f"{low + steps * step:.12g}"), high)

    def count(self, number: float) -> int:
        """Round a number of patients to a multiple of the unit, 0 only for 0, and return it as cases."""
        return max(self.unit, int(number / self.unit + 0.5) * self.unit) * self.usual if number > 0 else 0

    @property
    def cases(self) -> int:
        """Return the rounded number of cases."""
        return self.count(self.size)

    def shared_out(self, counts: Sequence[float]) -> list[float]:
        """Round counts that divide the patients, as classes do, so that they add up to the rounded total, in cases.

        A count may hold parts of patients. The units go by the greatest remainders, of equal ones to the first.
        """
        total, step = round(sum(counts)), self.unit * self.usual
        if self.exact or not total:
            return list(counts)
        units = self.count(total) // step
        wanted = [count * units / total for count in counts]
        given = [math.floor(share) for share in wanted]
        order = sorted(range(len(counts)), key=lambda place: given[place] - wanted[place])
        for place in order[: units - sum(given)]:
            given[place] += 1
        return [float(units * step) for units in given]
