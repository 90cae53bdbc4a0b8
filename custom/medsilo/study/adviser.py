"""The adviser: from a measuring study to an answer, with the rule that gave it and what is not known."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.plan import Plan
from medsilo.study.adviser_rules import CLOSE, LEAD, RULES, TOGETHER, Answer, Rule, standings
from medsilo.study.cells import Cell, Row, cells_of
from medsilo.study.measurement import NEEDED, PROBES, Measurement, check_rounds

Surety = Literal["fairly sure", "not sure", "cannot be known"]
FEW = 20  # validation cases, below which one case is more than a twentieth of what is measured
MADE_ON = (3, 6)  # hospitals of the federations on which rules were made
HARDLY = 0.6  # of the untrained model's loss: a mean that is above has hardly learned
OFTEN, TRIED = 0.75, 3  # a rule is fairly sure that was right so often on federations it was not made from, of so many
TABLE = "adviser.csv"  # how often each rule was right


@dataclass(frozen=True)
class Tries:
    """Counts of when a rule was right: on the federations it was made on, and on those it was only tried on."""

    made: tuple[int, int]  # right, of so many
    held_out: tuple[int, int]

    @property
    def often(self) -> bool:
        """Return whether a rule was right often enough on federations that no rule was made from."""
        right, asked = self.held_out
        return asked >= TRIED and right >= OFTEN * asked

    @property
    def words(self) -> str:
        """The counts as a sentence."""
        made, tried = self.made, self.held_out
        if not made[1] and not tried[1]:
            return "never asked of a federation whose best method is known"
        told = f"right in {made[0]} of the {made[1]} federations on which it was made and that it was asked of"
        if not tried[1]:
            return f"{told}; on federations that no rule was made from it was not asked"
        return f"{told}, and in {tried[0]} of {tried[1]} that no rule was made from"


@dataclass(frozen=True)
class Advice:
    """Advice: the methods to train, why, and how sure that is."""

    answer: Answer | None  # None: it can't be known
    first: str | None
    second: str | None
    train: tuple[str, ...]  # the first alone, or several, whose models answer together
    rule: str | None
    reason: str
    evidence: str
    sure: Surety
    losses: Mapping[str, float | None]  # of each method, the worst hospital counted more
    unknown: tuple[str, ...]  # what is not known, a sentence each


def tries() -> dict[str, Tries]:
    """Return how often each rule was right."""
    text = resources.files("medsilo.study").joinpath(TABLE).read_text("utf-8")
    return {
        row["rule"]: Tries(
            (int(row["made_right"]), int(row["made"])), (int(row["held_out_right"]), int(row["held_out"]))
        )
        for row in csv.DictReader(text.splitlines())
    }


def tried_together() -> tuple[int, int]:
    """Return how often the rules were right on federations that none was made from, and of how many."""
    counts = [own.held_out for own in tries().values()]
    return sum(right for right, _ in counts), sum(asked for _, asked in counts)


def ranked(losses: Mapping[str, float | None]) -> list[str]:
    """Return the methods that were measured, the least loss first."""
    known = {method: loss for method, loss in losses.items() if loss is not None}
    return sorted(known, key=known.__getitem__)


def chosen(losses: Mapping[str, float | None]) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule that answers, and the methods to train."""
    first, second, *others = ranked(losses)
    if not leads(losses, first, second):
        return CLOSE, (first, second, *others)[:TOGETHER]
    return next(rule for rule in RULES if first in rule.leaders), (first,)


def advise(measured: Measurement) -> Advice:
    """Return the advice that follows from a measuring study."""
    if len(measured.hospitals) < 2:
        raise MedsiloError("there is one hospital only, so nobody to learn with; give runs of two or more")
    losses = standings(measured)
    methods = ranked(losses)
    unknown = [*_not_told(measured, methods), *_beyond(measured)]
    if not methods:
        reason = "the hospitals do not tell enough for any rule"
        return Advice(None, None, None, (), None, reason, "none", "cannot be known", losses, tuple(unknown))
    first, second = methods[:2]
    rule, train = chosen(losses)
    tried = tries()[rule.name]
    sure: Surety = "fairly sure" if tried.often and not unknown else "not sure"
    if rule is CLOSE:
        near = f"{second}'s loss is {losses[second]:.3g}, and {first}'s {losses[first]:.3g}"
        unknown.append(f"which one is best, a close call: {near}")
    return Advice(rule.answer, first, second, train, rule.name, rule.reason, tried.words, sure, losses, tuple(unknown))


def leads(losses: Mapping[str, float | None], first: str, second: str) -> bool:
    """Return whether the first method is clearly ahead of the second."""
    least, next_least = losses[first], losses[second]
    return least is not None and next_least is not None and next_least > (1 + LEAD) * least


def _not_told(measured: Measurement, methods: Sequence[str]) -> list[str]:
    """Say what was not measured, and whose losses say little."""
    told = []
    if methods and (lacking := [method for method in PROBES if method not in methods]):
        told.append(f"what {' and '.join(lacking)} would do, which was not measured at all these hospitals")
    silent = [site for site, own in measured.hospitals.items() if own not in measured.telling]
    if silent:
        told.append(f"{', '.join(silent)} told no losses, so nothing here is about them")
    empty = [site for site, own in measured.hospitals.items() if own.train == 0]
    if empty:
        told.append(f"{', '.join(empty)} had no training cases")
    few = [site for site, own in measured.hospitals.items() if own.validation is not None and own.validation < FEW]
    if few:
        told.append(f"the losses of {', '.join(few)} rest on fewer than {FEW} validation cases")
    if measured.fallen_to is not None and measured.fallen_to > HARDLY:
        told.append(
            f"the mean's loss is still {measured.fallen_to:.0%} of the untrained model's, so that hospitals can hardly "
            "differ yet; measure again with more --rounds"
        )
    return told


def _beyond(measured: Measurement) -> list[str]:
    """Say where a consortium is unlike all on which rules were made."""
    least, most = MADE_ON
    count = len(measured.hospitals)
    return [] if least <= count <= most else [f"rules were made with {least} to {most} hospitals, and here are {count}"]


# ------------------------------------------------------------------------------------------------ measuring
def measuring_rounds(plan: Plan) -> int:
    """Return how long a measuring run is, unless somebody says otherwise: half as long as the study."""
    return max(3, math.ceil(plan.training.rounds / 2))


def measuring_cells(plan: Plan, rounds: int | None, folder: Path) -> tuple[list[Cell], list[str]]:
    """Return the measuring runs of a plan, and a line for each that its network or task can't have.

    rounds: of each run; by default half of the plan's, and three at least.
    """
    chosen = rounds or measuring_rounds(plan)
    check_rounds(chosen)
    length = [f"training.rounds={chosen}"]
    cells, passed = [], []
    for method in PROBES:
        try:
            cells += cells_of(plan, [Row.parse(method)], [plan.seed], length, folder)
        except PlanError as error:
            if method in NEEDED:
                raise
            passed.append(f"{method} is not measured: {error}")
    return cells, passed
