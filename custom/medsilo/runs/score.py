"""Define scores: a score is exact, or a range because it was rounded, or missing.

All code that formats scores uses this module. A rounded score is always shown as a range. The number of decimal places
depends on the number of cases.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, Self

from pydantic import Field

from medsilo.runs.fields import Amount, Count, Metric, RecordPart

MISSING, UNTRAINED, SEEN = "–", "untrained", "seen in training"
SUPPRESSED: Final = "suppressed"
UNDEFINED: Final = "undefined"
DIGITS, DIGITS_OF_FEW = 3, 2  # number of decimal places of a score over many cases, and over few cases
FEW = 100  # with fewer cases than this, the third decimal place of a score is only noise
UNIT_RANGE = (0.0, 1.0)
Interval = tuple[float, float]


class Score(RecordPart):
    kind: Literal["value", "range", "suppressed", "undefined", "missing"] = Field(
        description="`value`: exact. `range`: rounded. `suppressed`: the site does not disclose the score, because it "
        "covers too few patients. `undefined`: the metric is undefined, as the AUROC is if all cases have "
        "one class. `missing`: there is no score"
    )
    value: Metric | None = Field(None, description="the score, if it is exact")
    low: Metric | None = Field(None, description="smallest possible value")
    high: Metric | None = Field(None, description="largest possible value")
    n: Count | None = Field(
        None,
        description="number of test patients or, if this is unknown, of test cases; `null` if both are unknown",
    )
    step: Amount = Field(0.0, description="step to which the score was rounded; 0: no rounding")
    trained: bool = Field(True, description="whether the model was trained; `false`: the initial model of round 0")
    seen: bool = Field(False, description="whether the model was trained with some of the tested patients")

    @classmethod
    def told(
        cls,
        value: float | None,
        n: int | None = None,
        step: float = 0.0,
        *,
        trained: bool = True,
        seen: bool = False,
        absent: Literal["suppressed", "undefined", "missing"] = "missing",
        bounds: Interval = UNIT_RANGE,
    ) -> Self:
        """Create a score from the number that a site disclosed.

        Args:
            step: step to which the site rounded the number
            absent: why there is no number, if `value` is None
        """
        if value is None:
            return cls(kind=absent, n=n, step=step, trained=trained, seen=seen)
        if not step:
            return cls(kind="value", value=value, low=value, high=value, n=n, trained=trained, seen=seen)
        low, high = (min(max(value + off, bounds[0]), bounds[1]) for off in (-step / 2, step / 2))
        low, high = float(f"{low:.12g}"), float(f"{high:.12g}")
        return cls(kind="range", low=low, high=high, n=n, step=step, trained=trained, seen=seen)

    @classmethod
    def within(cls, ends: Interval, n: int | None = None) -> Self:
        return cls(kind="range", low=ends[0], high=ends[1], n=n, step=ends[1] - ends[0])

    @classmethod
    def mean(cls, low: float, high: float, parts: Sequence["Score"]) -> Self:
        """Create a score for the mean of several scores; the exact mean lies between `low` and `high`."""
        low, high = (float(f"{end:.12g}") for end in (low, high))  # removes rounding errors of sums
        n = None if any(part.n is None for part in parts) else sum(part.n or 0 for part in parts)
        step, trained = max(part.step for part in parts), all(part.trained for part in parts)
        seen = any(part.seen for part in parts)
        if not step:
            return cls(kind="value", value=low, low=low, high=high, n=n, trained=trained, seen=seen)
        return cls(kind="range", low=low, high=high, n=n, step=step, trained=trained, seen=seen)

    @property
    def known(self) -> bool:
        return self.low is not None

    @property
    def middle(self) -> float | None:
        """The middle of a score's range, for sorting and plotting only."""
        return None if self.low is None or self.high is None else (self.low + self.high) / 2

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return self.kind if self.kind in (SUPPRESSED, UNDEFINED) else MISSING
        if self.kind == "value":
            text = number_text(self.low, self.n)
        else:
            digits = min(_decimals(self.step / 2), DIGITS)
            ends = (_cut(self.low, digits, math.floor), _cut(self.high, digits, math.ceil))
            text = " to ".join(f"{end:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{end:.0f}" for end in ends)
        return " ".join([text, *([] if self.trained else [UNTRAINED]), *([SEEN] if self.seen else [])])


def about(text: str) -> str:
    """Mark a number that was computed from rounded numbers with ≈."""
    return text if text == MISSING else f"≈{text}"


def digits_of(n: int | None) -> int:
    """Return the number of decimal places for a score over n cases."""
    return DIGITS if n is None or n >= FEW else DIGITS_OF_FEW


def number_text(value: float | None, n: int | None = None) -> str:
    """Format a score with fewer decimal places if it covers few cases; a missing score becomes a dash."""
    return MISSING if value is None else f"{value:.{digits_of(n)}f}"


def interval_text(interval: Interval | None, n: int | None = None) -> str:
    return "" if interval is None else "–".join(number_text(end, n) for end in interval)


def _decimals(step: float) -> int:
    """Return the number of decimal places of a rounding step."""
    return len(f"{step:.10f}".rstrip("0").partition(".")[2])


def _cut(value: float, digits: int, towards: Callable[[float], int]) -> float:
    """Round an end of a range up or down to the given digits, as `towards` does."""
    return towards(round(value * 10**digits, 6)) / 10**digits
