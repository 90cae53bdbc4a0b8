"""Build a super model from a study's models: deliver personal models to the sites, choose the threshold gamma, and save
the result.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from medsilo.core.errors import Refused
from medsilo.core.rounding import Resolution
from medsilo.core.tensors import Modules, Tensors
from medsilo.core.text import plain
from medsilo.deploy.supermodel import GLOBAL, THRESHOLDS, Origin, Rule, SuperModel, Tuning, assemble, tune
from medsilo.learning.loop import as_scored
from medsilo.models.network import Network
from medsilo.runs import paths
from medsilo.runs.messages import MessageFacts
from medsilo.schedule.outcome import Outcome, Part, ServerEnd, SiteOutcome
from medsilo.schedule.phase import Facts, Group, Phase
from medsilo.tasks.task import check_absent

ALWAYS_COMMON = 1.0  # with this gamma, the selector is never confident enough to choose a personal model
DETAILS = "super_model"  # the key of the super model's facts in a study's summary


class Choices(MessageFacts):
    """A site's counts about the super model: for how many cases each model was chosen, and the sum of all cases' scores
    for each threshold.
    """

    chosen: dict[str, Annotated[int, Field(ge=1, le=1_000_000_000)]]
    sums: list[float] = []


class SuperModelNews(BaseModel):
    """The server's message to a site about the super model. The field `shown` names the hospitals whose personal models
    the server delivers to this site. Only the message before the test contains the super model's threshold and, for
    each site, the labels that the site did not annotate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    shown: tuple[str, ...] = ()
    threshold: float | None = Field(None, ge=0, le=1)
    absent: dict[str, tuple[str, ...]] = {}


class Counting(nn.Module):
    """A super model that counts how often its selector chooses each site's model."""

    def __init__(self, model: SuperModel) -> None:
        super().__init__()
        self.model = model
        self.chosen: Counter[str] = Counter()

    def forward(self, inputs: Tensor) -> Tensor:
        output, names, _ = self.model.answer(inputs)
        self.chosen.update(names)
        return output


@dataclass(frozen=True)
class SuperModelOutcome(Outcome):
    """Combine the tensor groups "global", "personal", "experts" and "selector" into a super model, at every site and at
    the server.

    Args:
        rule: the super model's rule for choosing a model
        selector: a function that returns the selector's network for the cases of a given network
        last: groups that are delivered only at the end; if empty, the groups of the last phase are the outcome
    """

    rule: Rule
    one_network: ClassVar[bool] = False
    selector: Callable[[nn.Module], Network]
    last: tuple[Group, ...] = ()
    personal: bool = True
    common: str | None = GLOBAL
    for_others: bool = True
    advice: str = ""  # advice in the warning that the global model predicts every case
    # A function that changes the selector at the end of the study, given the selector and the mean of the tensor group
    # "sums".
    finish: Callable[[nn.Module, Tensors], None] | None = None
    # If the selector recognises the right hospital for a smaller fraction of the cases, the global model predicts all
    # cases.
    least: float = 0.0

    @property
    def scores_besides(self) -> int:
        return len(THRESHOLDS) if self.rule == "threshold" else 0

    def delivery(self, last: Phase) -> Phase:
        if not self.last:
            return last
        return Phase("assemble", 0, (*(group.given_only() for group in last.groups), *self.last))

    def disclosure_notes(self) -> Sequence[str]:
        return [
            "personal model: at the end it goes to the other hospitals that share theirs, if share_personal_model in "
            "medsilo.yaml allows it (by default only with synthetic data); it is this hospital's full training result",
            "super model: how often each model was chosen for validation and test cases, and their summed scores",
            "super model: data.unannotated, where the personal model goes to other hospitals",
        ]

    # ------------------------------------------------------------------ at a site
    def take(self, end: SiteOutcome, facts: Facts) -> Facts:
        """Assemble the super model from the delivered models, and disclose the super model's scores on the validation
        cases.
        """
        shown = SuperModelNews.model_validate(facts).shown
        models = zip(end.plan.participation.sites, end.modules["experts"].children(), strict=True)
        personal = {site: expert.state_dict() for site, expert in models if site in shown}
        common, selector = (end.modules[name].state_dict() for name in ("global", "selector"))
        model = self._assemble(end.plan, end.modules, common, personal, selector)
        if self.finish:
            self.finish(model.selector, end.modules["sums"].state_dict())
        model.save(end.folder / paths.SUPER_MODEL)
        answer = self._score(_scorable(model, end, "validation"), end)
        if "validation" in end.suppressed:
            return {"chosen": {}, "sums": [0.0] * len(answer["sums"])}
        return _coarse(answer, end.task.goal.metric_range, end.resolution["validation"])

    def tested(self, end: SiteOutcome, model: nn.Module, facts: Facts) -> nn.Module:
        """Return the site's super model, set to the threshold that has the best mean score over all sites' validation
        cases.
        """
        found = SuperModelNews.model_validate(facts)
        for names in found.absent.values():
            check_absent(names, end.task)
        settled = SuperModel.load(end.folder / paths.SUPER_MODEL, end.plan)
        assert settled.origin
        settled.origin = replace(settled.origin, absent=found.absent)
        if found.threshold is not None:
            settled.threshold = found.threshold
        settled.save(end.folder / paths.SUPER_MODEL)
        return Counting(_scorable(settled, end, "test"))

    def after_test(self, end: SiteOutcome, model: nn.Module) -> Facts:
        assert isinstance(model, Counting)
        return {"chosen": {} if "test" in end.suppressed else _shared_out(model.chosen, end.resolution["test"])}

    @torch.no_grad()
    def _score(self, model: SuperModel, end: SiteOutcome) -> Facts:
        """Count how often each model is chosen for the validation cases. If the super model's rule has a threshold, the
        method also sums the cases' scores for each threshold that it tries. The number of passes over the cases does
        not depend on the number of tried thresholds.
        """
        chosen: Counter[str] = Counter()
        sums, of_patients = dict.fromkeys(THRESHOLDS, 0.0), not end.resolution["validation"].exact
        for inputs, targets in end.validation():
            end.stop()
            with end.compute.cast():
                output, names, confidence = model.answer(inputs)
                common = model.expert(GLOBAL)(inputs) if model.rule == "threshold" else output
            told = (as_scored(own.float(), of_patients) for own in (output, common))
            by_choice, by_all = (end.task.goal.case_scores(own, targets).double() for own in told)
            chosen.update(names)
            for threshold in THRESHOLDS:
                sums[threshold] += float(torch.where(confidence > threshold, by_choice, by_all).sum())
        if not all(map(math.isfinite, sums.values())):
            raise Refused("the super model's score on this site's validation cases is not a number")
        return {"chosen": dict(chosen), "sums": list(sums.values()) if model.rule == "threshold" else []}

    # ------------------------------------------------------------------ at the server
    def delivery_facts(self, end: ServerEnd, site: str) -> Facts:
        sharing = end.server.sharing()
        return {"shown": sorted({site} | (sharing if site in sharing else set()))}

    def read(self, answer: Any, part: Part, suppressed: bool, sites: Collection[str], cases: int) -> Choices:
        if answer is None:
            raise Refused("the answer has no results of the super model")
        told = Choices.received(answer)
        if bool(told.chosen) == suppressed:
            raise Refused("the answer does not say how often each model was chosen")
        if strangers := sorted(told.chosen.keys() - {GLOBAL, *sites}):
            raise Refused(f"the site chose models of {plain(strangers[0], 63)!r}, which is not a site of the study")
        counted = sum(told.chosen.values())
        if part == "validation" and not suppressed and counted != cases:
            raise Refused(f"the site chose models for {counted} cases and has only {cases} cases")
        sums = len(THRESHOLDS) if part == "validation" and self.rule == "threshold" else 0
        if len(told.sums) != sums:
            raise Refused(f"the answer does not give {sums} sums of scores")
        if any(not 0 <= total <= counted + 1e-6 for total in told.sums):
            raise Refused(f"a sum of scores is not between 0 and {counted}, the number of the site's cases")
        return told

    def conclude(self, end: ServerEnd, answers: Mapping[str, Any]) -> tuple[Facts, Facts]:
        """Determine the super model's threshold, and save the super model."""
        told: dict[str, Choices] = dict(answers)
        sites = end.plan.participation.sites
        mine = {site: told[site] for site in sites if site in told}
        tuning, share = tuned([*mine.values()]), recognised(mine)
        common_only = self.rule == "threshold" and share is not None and share < self.least
        common, selector = (
            end.server.aggregators[name].current(end.server.sites[0]) for name in ("global", "selector")
        )
        sharing = end.server.sharing()
        personal = {site: end.server.aggregators["personal"].current(site) for site in sites if site in sharing}
        absent = {site: tuple(names) for site in personal if (names := end.server.joined[site].absent)}
        model = self._assemble(end.plan, end.layout, common, personal, selector, tuning)
        if self.finish:
            self.finish(model.selector, end.server.aggregators["sums"].current(end.server.sites[0]))
        assert model.origin
        model.origin = replace(model.origin, absent=absent)
        if common_only:
            model.threshold = ALWAYS_COMMON
        model.save(end.folder / paths.SUPER_MODEL)
        details = {
            "rule": model.rule,
            "sites": list(model.sites),
            "agreed": list(model.agreed),
            "threshold": model.threshold,
            "plateau": list(tuning.plateau) if tuning else None,
            "curve": [list(point) for point in tuning.curve] if tuning else [],
            "validated": _chosen(told),
        }
        told_to_all: Facts = {"threshold": model.threshold}
        if absent:
            told_to_all["absent"] = {site: list(names) for site, names in absent.items()}
        found: Facts = {DETAILS: details}
        if common_only:
            found["warnings"] = [
                *end.plan.warnings(sites),
                f"the selector names the own hospital of {share:.0%} of validation cases, less than {self.least:.0%}, "
                f"so the global model answers for every image{self.advice}",
            ]
        return found, told_to_all

    def finalize(self, details: Facts, answers: Mapping[str, Any]) -> Facts:
        return {**details, DETAILS: {**details[DETAILS], "tested": _chosen(answers)}}

    def _assemble(
        self,
        plan: Any,
        modules: Modules,
        common: Tensors,
        personal: Mapping[str, Tensors],
        selector: Tensors,
        tuning: Tuning | None = None,
    ) -> SuperModel:
        threshold = None if self.rule != "threshold" else tuning.threshold if tuning else 0.0
        origin = Origin(plan, self.selector(modules["model"]))
        sites = plan.participation.sites
        return assemble(origin, common, personal, selector, threshold, sites=sites, rule=self.rule)


def _scorable(model: SuperModel, end: SiteOutcome, part: Part) -> SuperModel:
    """Move a super model to the site's device before its scores are computed. If the site's scores are rounded, finite
    numbers replace NaN and infinity in the selector's output, so that no single patient can stop the study.
    """
    if not end.resolution[part].exact:
        model.selector.register_forward_hook(lambda layer, inputs, output: as_scored(output, True))
    return model.to(end.compute.device)


def _coarse(answer: Facts, of_one: tuple[float, float], resolution: Resolution) -> Facts:
    """Round the numbers that a site discloses about the super model: how often each model was chosen, and the sums of
    scores.
    """
    if resolution.exact:
        return answer
    cases = sum(answer["chosen"].values())
    means = (resolution.mean(total / cases, *of_one) for total in answer["sums"])
    return {"chosen": _shared_out(answer["chosen"], resolution), "sums": [mean * resolution.counted for mean in means]}


def _shared_out(chosen: Mapping[str, int], resolution: Resolution) -> dict[str, int]:
    """Round how often each model was chosen, and leave out models whose rounded count is 0."""
    counts = [float(count) for count in chosen.values()]
    # It is unknown whose cases were counted, so the function assumes the worst: all belong to the patients with the
    # most cases.
    if not resolution.exact:
        largest = Resolution(unit=max(1, round(resolution.unit * resolution.weight * sum(counts))))
        counts = largest.shared_out(counts)
        counts = [count * resolution.size / sum(counts) for count in counts]
    told = resolution.shared_out(counts)
    return {name: int(count) for name, count in zip(chosen, told, strict=True) if count}


def tuned(told: Sequence[Choices]) -> Tuning | None:
    """Return the threshold with the best mean score over all sites. Return None if the super model's rule has no
    threshold, or if no site discloses counts.
    """
    cases = sum(sum(choices.chosen.values()) for choices in told)
    if not cases or not told[0].sums:
        return None
    sums = (math.fsum(column) for column in zip(*(choices.sums for choices in told), strict=True))
    return tune({gamma: (cases, total) for gamma, total in zip(THRESHOLDS, sums, strict=True)})


def recognised(choices: Mapping[str, Choices]) -> float | None:
    """Return the fraction of validation cases for which the selector chooses the case's own hospital."""
    shares = [
        choice.chosen.get(site, 0) / sum(choice.chosen.values()) for site, choice in choices.items() if choice.chosen
    ]
    return sum(shares) / len(shares) if shares else None


def _chosen(answers: Mapping[str, Choices]) -> dict[str, dict[str, int]]:
    return {site: answers[site].chosen for site in sorted(answers)}
