"""The adviser: from a measuring study to an answer, with the rule that gave it and what is not known."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from medsilo.core.errors import MedsiloError, PlanError
from medsilo.plan import Plan
from medsilo.study.adviser_rules import FACTS, RULES, Answer, Condition, Rule
from medsilo.study.cells import Cell, Row, cells_of
from medsilo.study.measurement import NEEDED, OWN_NORMS, PROBES, Measurement, check_rounds

Surety = Literal["fairly sure", "not sure", "cannot be known"]
CLOSE = 0.1  # of a condition's number: nearer than this, the answer could as well be the other
FEW = 20  # validation cases, below which one case is more than a twentieth of what is measured
MADE_ON = (3, 6)  # hospitals of the federations on which rules were made
HARDLY = 0.6  # of the untrained model's loss: a mean that is above has hardly learned
OFTEN, TRIED = 0.75, 3  # a rule is fairly sure that was right so often on federations it was not made from, of so many
NEED_NORMS = frozenset({"fedbn", "adafed"})  # methods that keep batch norm at home
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
    """Advice: the method to try first, why, and how sure that is."""

    answer: Answer | None  # None: it can't be known
    first: str | None
    second: str | None
    rule: str | None
    reason: str
    evidence: str
    sure: Surety
    facts: Mapping[str, float | None]
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


def rule_for(facts: Mapping[str, float | None], rules: Sequence[Rule] = RULES) -> tuple[Rule | None, list[Rule]]:
    """Return the first rule whose conditions all hold, and those before it that could not be asked."""
    skipped = []
    for rule in rules:
        values = [facts[condition.fact] for condition in rule.when]
        if any(value is None for value in values):
            skipped.append(rule)
        elif all(one.holds(value) for one, value in zip(rule.when, values, strict=True) if value is not None):
            return rule, skipped
    return None, skipped


def advise(measured: Measurement) -> Advice:
    """Return the advice that follows from a measuring study."""
    if len(measured.hospitals) < 2:
        raise MedsiloError("there is one hospital only, so nobody to learn with; give runs of two or more")
    facts = {name: fact.of(measured) for name, fact in FACTS.items()}
    rule, skipped = rule_for(facts)
    unknown = [*_not_told(measured, skipped), *_beyond(measured)]
    if rule is None or not measured.telling:
        reason = "the hospitals do not tell enough for any rule"
        return Advice(None, None, None, None, reason, "none", "cannot be known", facts, tuple(unknown))
    close = [one for one in _asked(rule) if _is_close(one, facts[one.fact])]
    unknown += [f"it is a close call: {one.words}, and it is {facts[one.fact]:.3g}" for one in close]
    methods = [name for name in (rule.first, rule.second) if name not in NEED_NORMS or measured.losses(OWN_NORMS)]
    if rule.first not in methods:
        unknown.append(f"{rule.first} would come first, but no model with batch norm was measured")
    tried = tries()[rule.name]
    sure: Surety = "fairly sure" if tried.often and not unknown else "not sure"
    first, second = [*methods, None, None][:2]
    return Advice(rule.answer, first, second, rule.name, rule.reason, tried.words, sure, facts, tuple(unknown))


def _asked(rule: Rule) -> list[Condition]:
    """Return the conditions that led to a rule: its own, and those of the rules before it."""
    return [condition for one in RULES[: RULES.index(rule) + 1] for condition in one.when]


def _is_close(condition: Condition, value: float | None) -> bool:
    return value is not None and abs(value - condition.number) < CLOSE * abs(condition.number)


def _not_told(measured: Measurement, skipped: Sequence[Rule]) -> list[str]:
    """Say what could not be asked, and whose losses say little."""
    told = [
        f"rule '{rule.name}' could not be asked, as {_lacking(rule, measured)}"
        for rule in skipped
        if measured.has_classes or "labels" not in {condition.fact for condition in rule.when}
    ]
    silent = [site for site, own in measured.hospitals.items() if own not in measured.telling]
    if silent:
        told.append(f"{', '.join(silent)} told no losses, so nothing here is about them")
    closed = [site for site, own in measured.hospitals.items() if measured.has_classes and own.classes is None]
    if closed:
        told.append(
            f"{', '.join(closed)} told no shares of classes, as hospitals with a rare class do not; shares may differ "
            "more than it seems"
        )
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


def _lacking(rule: Rule, measured: Measurement) -> str:
    absent = [condition.fact for condition in rule.when if FACTS[condition.fact].of(measured) is None]
    return f"the {' and the '.join(FACTS[name].words for name in absent)} is not known"


def _beyond(measured: Measurement) -> list[str]:
    """Say where a consortium is unlike all on which rules were made."""
    least, most = MADE_ON
    count = len(measured.hospitals)
    return [] if least <= count <= most else [f"rules were made with {least} to {most} hospitals, and here are {count}"]


# ------------------------------------------------------------------------------------------------ measuring
def measuring_cells(plan: Plan, rounds: int | None, folder: Path) -> tuple[list[Cell], list[str]]:
    """Return the measuring runs of a plan, and a line for each that its network or task can't have.

    rounds: of each run; by default a third of the plan's, and three at least.
    """
    chosen = rounds or max(3, round(plan.training.rounds / 3))
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
