"""The adviser's rules as data: facts of a measuring study, conditions on them, and the answer where all hold.

The first rule whose conditions hold answers. benchmarks/advise made the numbers on generated federations, and tried the
rules on others; how often each was right stands in advice.csv.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from medsilo.study.measured import ALONE, OWN_NORMS, TOGETHER, TUNED, Measured

Answer = Literal["plain mean", "harmonise", "personalise", "stay alone"]


@dataclass(frozen=True)
class Fact:
    """A number that follows from a measuring study; None where the hospitals do not tell enough."""

    words: str
    of: Callable[[Measured], float | None]


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


def _loss_ratio(one: str, other: str) -> Callable[[Measured], float | None]:
    """Return the ratio of two runs' mean losses."""

    def ratio(measured: Measured) -> float | None:
        own, others = measured.losses(one), measured.losses(other)
        if own is None or others is None or fmean(others) <= 0:
            return None
        return fmean(own) / fmean(others)

    return ratio


def _least_gain(measured: Measured) -> float | None:
    """Return what joining gains the hospital that it gains least, in the score's unit."""
    alone, together = measured.scores(ALONE), measured.scores(TOGETHER)
    if alone is None or together is None:
        return None
    return min(after - before for before, after in zip(alone, together, strict=True))


def _smallest(measured: Measured) -> float | None:
    """Return the training cases of the smallest hospital that tells them."""
    told = [own.train for own in measured.hospitals.values() if own.train is not None]
    return min(told) if told else None


def _size_ratio(measured: Measured) -> float | None:
    """Return how many times as many training cases the largest hospital has as the smallest."""
    told = [own.train for own in measured.hospitals.values() if own.train]
    return max(told) / min(told) if len(told) > 1 else None


def label_distance(measured: Measured) -> float | None:
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
    "alone": Fact("loss of models trained alone, divided by the mean's", _loss_ratio(ALONE, TOGETHER)),
    "norms": Fact("loss with batch norm kept at home, divided by the mean's", _loss_ratio(OWN_NORMS, TOGETHER)),
    "alone over norms": Fact(
        "loss of models trained alone, divided by that with batch norm at home", _loss_ratio(ALONE, OWN_NORMS)
    ),
    "tuned": Fact("loss after fine-tuning at home, divided by the mean's", _loss_ratio(TUNED, TOGETHER)),
    "least gain": Fact("score that the mean gains the hospital that it helps least", _least_gain),
    "labels": Fact("distance of the hospitals' shares of classes", label_distance),
    "agreement": Fact("cosine of the hospitals' first updates", lambda measured: measured.agreement),
    "smallest": Fact("training cases of the smallest hospital", _smallest),
    "sizes": Fact("cases of the largest hospital, divided by the smallest's", _size_ratio),
}

RULES: tuple[Rule, ...] = (
    Rule(
        "labels",
        (Condition("labels", "at least", 0.15),),
        "personalise",
        "adafed",
        "fine-tuning",
        "the hospitals' shares of classes are far apart, so that each needs a model that knows its own shares",
    ),
    Rule(
        "strangers",
        (Condition("alone", "at most", 0.45), Condition("alone over norms", "at most", 0.9)),
        "stay alone",
        "local",
        "ditto",
        "models trained alone are far ahead of every shared one: the hospitals have little in common",
    ),
    Rule(
        "question",
        (Condition("alone", "at most", 0.9), Condition("alone over norms", "at most", 0.95)),
        "personalise",
        "ditto",
        "adafed",
        "models trained alone are ahead, also where batch norm stays at home: not the looks differ but the answers",
    ),
    Rule(
        "looks",
        (Condition("norms", "at most", 0.97),),
        "harmonise",
        "fedbn",
        "adafed",
        "the mean gets better where batch norm stays at home: the hospitals' inputs look different",
    ),
    Rule(
        "alike",
        (Condition("norms", "at least", 0.97),),
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
