"""Check every part of a site's answer before the server uses any part."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from medsilo.core.errors import Refused
from medsilo.core.package import machine_facts
from medsilo.core.text import plain
from medsilo.exchange.checks import check_packages
from medsilo.plan import Plan
from medsilo.runs.messages import (
    ANSWERS,
    DISCLOSED,
    MOST_VALUES,
    Counted,
    Delivered,
    Joined,
    SiteAnswer,
    StudyMessage,
    Tested,
    Trained,
    check_values,
)
from medsilo.schedule.outcome import Part
from medsilo.schedule.weighting import update_weight
from medsilo.tasks.metrics import OF_CLASSES
from medsilo.tasks.subgroups import HOSPITAL
from medsilo.tasks.task import check_absent

# for each kind of request: the names of the answer's scores that must lie in the range of the task's metric
SCORES = {
    task: [name for name, own in answer.items() if own.form == "mean" and own.between is None]
    for task, answer in DISCLOSED.items()
}
Asked = tuple[str, int]  # a request's task and round


class Acceptance:
    """Checks each answer of a site against the server's request and against the site's answer to "join"."""

    def __init__(self, plan: Plan, study: str, sites: Sequence[str], everyone: Sequence[str]) -> None:
        self.plan, self.study, self.sites, self.everyone = plan, study, sites, everyone
        self.joined: dict[str, Joined] = {}  # each site's answer to the request "join"
        # The first answer of each site; all later answers of the site must state the same numbers of cases
        self.stated: dict[str, SiteAnswer] = {}
        self.most_values = MOST_VALUES + len(everyone) + sum(plan.task.goal.layout.values())

    def accept(self, site: str, message: StudyMessage, request: Asked, known: Collection[str]) -> SiteAnswer:
        """Return the answer as a typed object, or raise Refused if the answer is invalid.

        Args:
            known: the sites that have answered already
        """
        task, number = request
        if site not in (self.sites if task == "round" else self.everyone):
            raise Refused(f"{site} is not a site of this study")
        if site in known:
            raise Refused(f"{site} answered twice; the first answer counts")
        facts = message.facts
        if not isinstance(facts, dict):
            raise Refused("the answer's facts are not a mapping")
        check_values(facts, self.most_values)
        if facts.get("study") != self.study or facts.get("task") != task or facts.get("round") != number:
            other = (plain(str(facts.get(key)), 40) for key in ("task", "round"))
            raise Refused(
                f"the answer names {' '.join(other)}, or another study, instead of {task} {number} of this one"
            )
        check_packages(facts.get("packages"), self.plan.code)
        answer = ANSWERS[task].received(facts)
        counted = ("train", "validation", "test") if not self.plan.task.scripted else ("train",)
        for part in counted if site in self.sites else counted[2:]:
            if getattr(answer.cases, part) == 0:
                raise Refused(f"the answer's cases.{part}: 0 is out of range; the number must be at least 1")
        if isinstance(answer, Joined):
            self._check_joined(answer)
            return self._compared(answer)
        self._same_cases(site, answer)
        if site not in self.joined and isinstance(answer, Trained) and (told := self.too_large(site, answer)):
            raise Refused(told)
        for name in SCORES[task]:
            self._in_range(name, getattr(answer, name))
        if isinstance(answer, Tested):
            self._check_test(site, answer, number)
        if isinstance(answer, Delivered | Tested):
            self.outcome_of(answer)
        return answer

    def _check_test(self, site: str, answer: Tested, number: int) -> None:
        if answer.selected > number:
            raise Refused(f"the site tested the model of round {answer.selected}, and there are {number} rounds")
        check_counts(answer.counts, self.plan, answer.counted)
        check_threshold(answer.threshold, answer.counts, self.plan)
        self._check_subgroups(site, answer)

    def _check_subgroups(self, site: str, answer: Tested) -> None:
        for subgroup in answer.subgroups:
            self._in_range(f"test (subgroup {plain(subgroup.level, 60)})", subgroup.score)
            if subgroup.subgroup == HOSPITAL and subgroup.level != site:
                raise Refused("the site sends the score of another hospital")
        if answer.subgroups and (self.plan.task.scripted or answer.test is None):
            raise Refused("the site sends scores of subgroups, but no score over all test cases")

    def _same_cases(self, site: str, answer: SiteAnswer) -> None:
        first = self.stated.get(site)
        if first and (first.cases, first.patients) != (answer.cases, answer.patients):
            raise Refused("the site's numbers of cases or patients differ from those at joining")

    def too_large(self, site: str, answer: SiteAnswer) -> str:
        """Return the reason why a site's weight in the average would exceed the plan's limit, or an empty text if the
        weight is allowed.
        """
        if site not in self.sites or not self.plan.weighs_cases:
            return ""
        among = {name: self.weight_of(own) for name, own in self.joined.items() if name in self.sites}
        total = sum((among | {site: (own := self.weight_of(answer))}).values())
        most = self.plan.participation.max_share
        if len(among.keys() | {site}) < 2 or own <= most * total:
            return ""
        unit = "patients" if self.plan.weighting == "patients" else "cases"
        return (
            f"the site states {own:,} of all {total:,} training {unit}, and participation.max_share is {most:g}: the "
            "mean would be nearly the site's model alone; ask the site, and raise max_share if the number is true"
        )

    def weight_of(self, answer: SiteAnswer) -> int:
        """Compute the weight that a site would have in the average if it trained on all its training cases. The
        computation uses the numbers that the site stated.
        """
        return update_weight(self.plan.weighting, answer.cases.train, answer.cases.train, answer.patients.train)

    def _in_range(self, name: str, score: float | None) -> None:
        low, high = self.plan.task.goal.metric_range
        if score is not None and not low <= score <= high:
            raise Refused(f"the site's {name} score {score:g} is outside {low:g} to {high:g}, the range of the metric")

    def _check_joined(self, answer: Joined) -> None:
        known = self.plan.task.goal.classes
        for part, counts in answer.classes.items():
            if counts is not None and len(counts) != known:
                raise Refused(f"the site's counts of classes in the {part} part are not {known} whole numbers")
        if odd := sorted(answer.machine.keys() - machine_facts().keys()):
            raise Refused(f"the answer's machine: unexpected field: {plain(odd[0], 40)}")
        check_absent(answer.absent, self.plan.task)

    def _compared(self, answer: Joined) -> Joined:
        """If a site's machine differs from the server's, and the last digits of results may therefore differ, add a
        warning to the site's answer.
        """
        own = machine_facts()
        names = [name for name in own if answer.machine.get(name) != own[name]]
        told = {
            name: f"{name} {plain(answer.machine.get(name, '(not told)'))}, the server {own[name]}" for name in names
        }
        if refused := [told[name] for name in names if name in self.plan.participation.require_same_versions]:
            raise Refused(
                f"runs {'; '.join(refused)}; participation.require_same_versions demands the server's version: "
                f"install that"
            )
        if not told:
            return answer
        warning = f"runs {'; '.join(told.values())}: its last digits may differ from those of the same study elsewhere"
        answer.note(warning)
        return answer

    def outcome_of(self, answer: Delivered | Tested) -> Any:
        part: Part = "validation" if isinstance(answer, Delivered) else "test"
        cases = getattr(answer.counted, part)
        suppressed = part in answer.suppressed or part in answer.noisy
        return self.plan.algorithm.outcome.read(answer.outcome, part, suppressed, self.sites, cases)


def check_counts(counts: Mapping[str, list[float]], plan: Plan, cases: Counted) -> None:
    """Raise Refused if a site cannot have these counts, given the task and the site's number of test cases."""
    layout, most = plan.task.goal.layout, cases.test
    for name, values in counts.items():
        if name not in layout:
            raise Refused(f"the site's counts have the unexpected entry {plain(name, 40)}")
        if len(values) != layout[name]:
            raise Refused(f"the site's counts of {name} are not {layout[name]} numbers")
        if name not in OF_CLASSES:
            check_sum(name, values, most, plan.task.goal.range_of(name))
    if told := plan.task.goal.classifies:
        told.check(counts, most)


def check_threshold(threshold: float | None, counts: Mapping[str, list[float]], plan: Plan) -> None:
    """Raise Refused if the answer has a threshold for which the plan does not ask, or a threshold that contradicts the
    answer's counts.
    """
    if threshold is None:
        return
    if not plan.has_threshold or (told := plan.task.goal.classifies) is None:
        raise Refused("unexpected field: threshold")
    told.check_threshold(threshold, counts)


def check_sum(name: str, values: Sequence[float], most: int, between: tuple[float, float]) -> None:
    """Raise Refused if a sum covers more cases than the site has, or if the sum is impossible for this number of
    covered cases.
    """
    (summed, number), (low, high) = values, between
    if number < 0 or number > most or number != math.floor(number):
        raise Refused(f"the site's counts of {name} cover {number:g} cases, and the site has {most} cases")
    if not number * low - 1e-3 <= summed <= number * high + 1e-3:
        raise Refused(f"the site's sum of {name}, {summed:g}, is not one of {number:g} values from {low:g} to {high:g}")
