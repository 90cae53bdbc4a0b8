"""Round means and counts over a group of patients, so that the rounded values reveal no single patient."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

STEPS = (1, 2, 5)  # each rounding step is 1, 2 or 5 times a power of ten


def step_of_at_least(width: float) -> float:
    """Return the smallest step of the sequence ..., 0.1, 0.2, 0.5, 1, 2, 5, ... that is at least `width`; for width 0,
    return 0.
    """
    if width <= 0:
        return 0.0
    power = math.floor(math.log10(width))
    found = (first * 10.0**tens for tens in (power - 1, power, power + 1) for first in STEPS)
    return float(f"{next(step for step in found if step >= width * (1 - 1e-9)):.1e}")


@dataclass(frozen=True)
class Resolution:
    weight: float = 0.0  # fraction of the group's cases that the patient with the most cases has
    # A mean is rounded to the largest change that this number of patients can cause; with 0 patients, means stay exact.
    patients: int = 0
    unit: int = 1  # counts are rounded to multiples of this number of patients
    # the most cases that one patient has, rounded up to one digit, so that one patient seldom changes this number
    largest: int = 1
    size: int = 0  # number of patients
    number: int = 0  # number of cases

    @classmethod
    def over(cls, names: Sequence[str], patients: int, unit: int) -> "Resolution":
        """Return the rules by which means and counts over one group of cases are rounded.

        Args:
            patients: The number of patients who move a mean by at most one rounding step.
            unit: Counts are rounded to multiples of this number of patients.
        """
        each = sorted(Counter(names).values()) or [0]
        size = len(set(names))
        return cls(each[-1] / max(len(names), 1), patients, unit, _one_digit(each[-1]), size, len(names))

    def among(self, share: float) -> "Resolution":
        """Return the rounding rules for a subset of the group's cases, in which one patient may have a larger fraction
        of the cases.

        Args:
            share: The fraction of the group's cases that are in the subset.
        """
        return replace(self, weight=min(1.0, self.weight / share))

    @property
    def exact(self) -> bool:
        return not self.patients and self.unit == 1

    def step(self, low: float, high: float) -> float:
        """Return the rounding step for a mean of values that lie between `low` and `high`."""
        return step_of_at_least(self.patients * self.weight * (high - low))

    def mean(self, value: float, low: float, high: float) -> float:
        """Round a mean to a value that is `low` plus a whole number of rounding steps, and that is at most `high`."""
        step = self.step(low, high)
        if not step or math.isnan(value):
            return value
        steps = round((min(max(value, low), high) - low) / step)
        return min(float(f"{low + steps * step:.12g}"), high)

    def count(self, number: float) -> int:
        """Round a number of patients to a multiple of `unit`; a positive number is rounded to at least `unit`."""
        return _multiple(number, self.unit)

    @property
    def counted(self) -> int:
        return self.count(self.size)

    @property
    def cases(self) -> int:
        """The rounded number of cases in the group of patients.

        The number of cases is rounded to a multiple of `unit` · `largest`, but to no less than the rounded number of
        patients.
        """
        return self.number if self.exact else max(_multiple(self.number, self.unit * self.largest), self.counted)

    def shared_out(self, counts: Sequence[float]) -> list[float]:
        """Round counts that partition the patients, such as counts per class. The rounded counts add up to `counted`.

        A count need not be a whole number, because a patient's cases may be in several classes. The function rounds up
        the counts with the largest remainders; of counts with equal remainders, it rounds up the first count.
        """
        total = round(sum(counts))
        if self.exact or not total:
            return list(counts)
        units = self.count(total) // self.unit
        wanted = [count * units / total for count in counts]
        given = [math.floor(share) for share in wanted]
        order = sorted(range(len(counts)), key=lambda place: given[place] - wanted[place])
        for place in order[: units - sum(given)]:
            given[place] += 1
        return [float(units * self.unit) for units in given]


def _one_digit(number: int) -> int:
    """Round a number up to one significant digit; the result is at least 1.

    >>> [_one_digit(number) for number in (0, 1, 14, 40)]
    [1, 1, 20, 40]
    """
    step = 10 ** (len(str(max(number, 1))) - 1)
    return max(-(-number // step) * step, 1)


def _multiple(number: float, step: int) -> int:
    """Round a number to a multiple of `step`; a positive number is rounded to at least `step`."""
    return max(step, int(number / step + 0.5) * step) if number > 0 else 0
