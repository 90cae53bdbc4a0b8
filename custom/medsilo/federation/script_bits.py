"""Bound the information, in bits, that a training script can send in its messages.

The bounds are computed from the types of a message's fields, because a script can encode any information in its
numbers.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from medsilo.core.tensors import packed
from medsilo.exchange.bounds import MOST_UNNAMED
from medsilo.plan import Plan
from medsilo.runs.messages import (
    ALL_DISCLOSED,
    DISCLOSED,
    MOST_CASES,
    MOST_WARNINGS,
    PARTS,
    WARNINGS,
    StudyMessage,
    declared,
)
from medsilo.schedule.phase import views
from medsilo.site.settings import DataPart

Kind = Literal["tensors", "metrics", "counts", "logged numbers", "times", "warnings"]
KINDS: tuple[Kind, ...] = ("tensors", "metrics", "counts", "logged numbers", "times", "warnings")
REAL = 64  # bits of a floating-point number
COUNT = math.ceil(math.log2(MOST_CASES + 1))
STEP = 53  # bits of the step at which a number was logged
MOST_LOGGED = 10_000  # maximum number of values that a script may log in a round
WARNING = math.ceil(math.log2(len(WARNINGS))) + 3 * REAL
# names of an answer's scores and losses, each with the part of the data from which it is computed
SCORES: Mapping[str, DataPart] = {
    name: own.part for name, own in ALL_DISCLOSED.items() if own.form == "mean" and own.part
}


@dataclass(frozen=True)
class Stretch:
    """A series of rounds whose messages have equal sizes, or one message at the beginning or end of a study."""

    task: str
    first: int
    last: int
    bits: Mapping[Kind, int]  # number in each round
    parameters: int = 0  # number of tensor elements in each message

    @property
    def times(self) -> int:
        return self.last - self.first + 1


def most_bits(plan: Plan) -> list[Stretch]:
    """Return the maximum number of bits that a training script may send in each round, and at the beginning and end of
    the study.
    """
    rounds, ends = list(_rounds(plan)), (Stretch(task, 0, 0, _beside(plan, task)) for task in ("deliver", "test"))
    return [Stretch("join", 0, 0, _beside(plan, "join")), *rounds, *ends]


def _rounds(plan: Plan) -> Iterator[Stretch]:
    modules = plan.layout()
    for stretch in plan.course.stretches():
        sent = [tensor for tensors in views(stretch.phase.sent, modules).values() for tensor in tensors.values()]
        bits = {
            **_beside(plan, "round"),
            "tensors": 8 * sum(packed(own, plan.transport.precision).nbytes for own in sent),
        }
        yield Stretch("round", stretch.first, stretch.last, bits, sum(own.numel() for own in sent))


def _beside(plan: Plan, task: str) -> dict[Kind, int]:
    """Return the maximum number of bits in all fields of one message, not counting the message's tensors."""
    forms = Counter(own.form for own in DISCLOSED[task].values())
    metrics = most_metrics(task)
    counts = forms["cases"] * len(PARTS) + forms["count"]
    chosen = forms["round"] * _bits_below(plan.rounds + 1)
    logged = MOST_LOGGED * _logged(plan) if task == "round" else 0
    outcome = plan.algorithm.outcome
    # The outcome of a super model contains scores, and the number of cases for which each site's model was chosen.
    if task in ("deliver", "test") and not outcome.one_network:
        counts += (len(plan.participation.everyone) or MOST_UNNAMED) + 1
        metrics += outcome.scores_besides if task == "deliver" else 0
    return {
        "tensors": 0,
        "metrics": metrics * REAL + most_metrics(task),
        "counts": counts * COUNT + chosen,
        "logged numbers": logged,
        "times": forms["time"] * REAL,
        "warnings": forms["warnings"] * MOST_WARNINGS * WARNING,
    }


def most_metrics(task: str) -> int:
    """Return the maximum number of metrics in one message."""
    return sum(own.form in ("mean", "threshold") for own in DISCLOSED.get(task, {}).values())


def logged_names(plan: Plan) -> set[str]:
    """Return the names of the numbers that a script may send as logged metrics."""
    told = plan.task.model_dump()
    return {told["metric"], *told["logs"]}


def _logged(plan: Plan) -> int:
    """Return the number of bits of one logged number, which consists of a name, a value and a step."""
    return math.ceil(math.log2(max(len(logged_names(plan)), 1))) + REAL + STEP


@dataclass(frozen=True)
class Narrowing:
    """The rules by which an airlock reduces the information that a message can carry."""

    score: int  # bits of each score or loss
    halves: bool  # whether weights are rounded to bfloat16
    # whether later answers must contain the same numbers of cases that the script reported when joining
    knows_cases: bool


ALL = Narrowing(REAL, False, False)


def bits_of(answer: StudyMessage, narrowing: Narrowing = ALL) -> Counter[str]:
    """For each kind of field, return the number of bits that the fields of an answer can carry. Raises Refused if a
    field of the answer is not declared.
    """
    facts = answer.facts
    found = Counter[str](
        tensors=sum(_bits_in(own, narrowing) for group in answer.groups.values() for own in group.values())
    )
    # one more bit for each metric, because a script can choose to send the metric or to leave it out
    found["metrics"] = most_metrics(str(facts.get("task")))
    found["counts"] = found["times"] = found["warnings"] = 0
    for name, value in facts.items():
        form = declared(name).form
        if value is None:
            continue
        if form in ("mean", "threshold"):
            found["metrics"] += narrowing.score
        elif form == "cases":
            known = narrowing.knows_cases and facts.get("task") != "join"
            found["counts"] += 0 if known else COUNT * len(value)
        elif form == "count":  # at most the number of training cases that the site sent when joining
            found["counts"] += _bits_below(facts["cases"]["train"]) if narrowing.knows_cases else COUNT
        elif form == "round":
            found["counts"] += _bits_below(facts["round"] + 1)
        elif form == "numbers":
            for number in _numbers(value):
                kind, bits = ("metrics", REAL) if isinstance(number, float) else ("counts", COUNT)
                found[kind] += bits
        elif form == "time":
            found["times"] += REAL
        elif form == "warnings":
            found["warnings"] += WARNING * len(value)
    return found


def parts_in(answer: StudyMessage) -> dict[DataPart, int]:
    """For each part of the data set about which a script's message contains a score or loss, return the count 1.

    A loss counts like a score, because a script can write any number into a loss.
    """
    return {part: 1 for name, part in SCORES.items() if answer.facts.get(name) is not None}


def _bits_in(tensor: Tensor, narrowing: Narrowing) -> int:
    """Return the bits that a script can hide in a tensor."""
    if tensor.dtype is torch.bool:
        return tensor.numel()
    each = 8 * tensor.element_size()
    return tensor.numel() * (min(each, 16) if narrowing.halves and tensor.is_floating_point() else each)


def _bits_below(number: int) -> int:
    """Return the number of bits that can encode any non-negative integer below the given number."""
    return math.ceil(math.log2(max(number, 1)))


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a value of a message, such as a nested list."""
    if isinstance(value, dict | list | tuple):
        for own in value.values() if isinstance(value, dict) else value:
            yield from _numbers(own)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def in_all(stretches: Sequence[Stretch]) -> Counter[str]:
    """Return, for each kind of field, the total bits in all messages of a study."""
    found: Counter[str] = Counter()
    for stretch in stretches:
        found.update({kind: stretch.times * bits for kind, bits in stretch.bits.items()})
    return found
