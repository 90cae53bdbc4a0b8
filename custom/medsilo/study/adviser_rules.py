"""The adviser's rules as data: which answer follows from the method that did best in a measuring study, and why.

One number ranks methods, and nothing in it was fitted closely: benchmarks/advise chose it on generated federations and
tried it on others; how often each rule was right stands in adviser.csv.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from medsilo.study.measurement import PROBES, Measurement

Answer = Literal["plain mean", "harmonise", "personalise", "stay alone", "answer together"]
WORST = 1 / 3  # share of the worst hospital's loss in a method's; the mean over hospitals is the rest
LEAD = 0.1  # a method is clearly ahead whose loss is so much smaller, as a share of its own, than the next one's
TOGETHER = 4  # methods whose models answer together where none is clearly ahead


@dataclass(frozen=True)
class Rule:
    """One rule: the methods whose clear lead means this answer, and why."""

    name: str
    leaders: tuple[str, ...]
    answer: Answer
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        "one model",
        ("fedavg",),
        "plain mean",
        "one shared model does best at the hospitals' own cases: they are alike enough, and learn from more cases",
    ),
    Rule(
        "own norms",
        ("fedbn",),
        "harmonise",
        "the shared model does best where batch norm stays at home: inputs look different, the question is the same",
    ),
    Rule(
        "own models",
        ("adafed", "ditto", "fedper", "fine-tuning"),
        "personalise",
        "a model of each hospital's own that also learns from the others does best: neither one model nor none",
    ),
    Rule(
        "alone",
        ("local",),
        "stay alone",
        "models trained alone do best: what the others know does not help here",
    ),
)
CLOSE = Rule(
    "close call",
    (),
    "answer together",
    "no method is clearly ahead, and the mean of what several models say is seldom far behind the best of them",
)
EVERY_RULE = (*RULES, CLOSE)


def standing(measured: Measurement, method: str) -> float | None:
    """Return a method's loss: the mean over hospitals, in which the worst hospital counts once more by WORST.

    None where a hospital that tells losses does not tell this one.
    """
    losses = measured.losses(method)
    return None if losses is None else (1 - WORST) * fmean(losses) + WORST * max(losses)


def standings(measured: Measurement) -> dict[str, float | None]:
    """Return the loss of every method that a measuring study may have."""
    return {method: standing(measured, method) for method in PROBES}
