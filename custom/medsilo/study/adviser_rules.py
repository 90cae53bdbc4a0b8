"""The adviser's rules as data: facts of a measuring study, conditions on them, and the answer where all hold.

The first rule whose conditions hold answers. benchmarks/advise made the numbers on generated federations, and tried the
rules on others; how often each was right stands in adviser.csv.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from medsilo.study.measurement import ALONE, OWN_NORMS, TOGETHER, Measurement

Answer = Literal["plain mean", "harmonise", "personalise", "stay alone"]


@dataclass(frozen=True)
class Fact:
    """A number that follows from a measuring study; None where the hospitals do not tell enough."""

    words: str
    of: Callable[[Measurement], float | None]


@dataclass(frozen=True)
class Condition:
    """A fact that is at least, or at most, a number."""

    fact: str
    sign: Literal["at least", "at most"]
    number: float

    @property
    def words(self) -> str:
        """The condition as a person reads it."""
        return f"{FACTS[self.fact].words} is {self.sign} {self.number:g}"

    def holds(self, value: float) -> bool:
        """Return whether a value fulfils it."""
        return value >= self.number if self.sign == "at least" else value <= self.number


@dataclass(frozen=True)
class Rule:
    """One rule: its conditions, the answer, the method to try first and the one to try next, and why."""

    name: str
    when: tuple[Condition, ...]
    answer: Answer
    first: str
    second: str
    reason: str


def _loss_ratio(one: str, other: str) -> Callable[[Measurement], float | None]:
    """Return the ratio of two runs' mean losses."""

    def ratio(measured: Measurement) -> float | None:
        own, others = measured.losses(one), measured.losses(other)
        if own is None or others is None or fmean(others) <= 0:
            return None
        return fmean(own) / fmean(others)

    return ratio


def label_distance(measured: Measurement) -> float | None:
    """Return how far a hospital's shares of classes are from those of all together, on average: 0 alike, 1 apart.

    Hospitals that do not tell their classes are left out; None where fewer than two do.
    """
    told = [own.classes for own in measured.hospitals.values() if own.classes and sum(own.classes)]
    if len(told) < 2 or len({len(own) for own in told}) > 1:
        return None
    shares = [[count / sum(own) for count in own] for own in told]
    middle = [fmean(column) for column in zip(*shares, strict=True)]
    return fmean(sum(abs(a - b) for a, b in zip(own, middle, strict=True)) / 2 for own in shares)


FACTS: Mapping[str, Fact] = {
    "labels": Fact("distance of the hospitals' shares of classes", label_distance),
    "alone": Fact("loss of models trained alone, divided by the mean's", _loss_ratio(ALONE, TOGETHER)),
    "alone over norms": Fact(
        "loss of models trained alone, divided by that with batch norm at home", _loss_ratio(ALONE, OWN_NORMS)
    ),
    "norms": Fact("loss with batch norm at home, divided by the mean's", _loss_ratio(OWN_NORMS, TOGETHER)),
}

RULES: tuple[Rule, ...] = (
    Rule(
        "labels",
        (Condition("labels", "at least", 0.18),),
        "personalise",
        "adafed",
        "fine-tuning",
        "the hospitals' shares of classes are far apart, so that each needs a model that knows its own shares",
    ),
    Rule(
        "answers",
        (Condition("alone", "at most", 0.9), Condition("alone over norms", "at most", 0.95)),
        "stay alone",
        "local",
        "ditto",
        "models trained alone are ahead, also where batch norm stays at home: not the looks differ but the answers",
    ),
    Rule(
        "looks",
        (Condition("norms", "at most", 0.95),),
        "harmonise",
        "fedbn",
        "adafed",
        "the mean gets better where batch norm stays at home: the hospitals' inputs look different",
    ),
    Rule(
        "in between",
        (Condition("norms", "at most", 1.0),),
        "personalise",
        "fine-tuning",
        "fedavg",
        "batch norm at home hardly helps; a model that is tuned at home begins with the mean and loses little",
    ),
    Rule(
        "alike",
        (Condition("norms", "at least", 1.0),),
        "plain mean",
        "fedavg",
        "fine-tuning",
        "nothing that was measured speaks against one shared model",
    ),
    Rule(
        "apart, no batch norm",
        (Condition("alone", "at most", 0.9),),
        "personalise",
        "ditto",
        "local",
        "models trained alone are ahead, and without batch norm nobody can say whether looks or answers differ",
    ),
    Rule(
        "alike, no batch norm",
        (Condition("alone", "at least", 0.9),),
        "plain mean",
        "fedavg",
        "fine-tuning",
        "models trained alone are not ahead of the mean; the network has no batch norm that could tell more",
    ),
)
