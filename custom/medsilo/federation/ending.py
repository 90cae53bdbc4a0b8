"""The end of a method that makes a super model: who is shown whose personal model, how gamma is found, what is kept."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medsilo.algorithms.base import Modules, Parcel
from medsilo.errors import Refused
from medsilo.federation.checks import same_names
from medsilo.learning.loop import Compute
from medsilo.mixing.mixers import Mixer
from medsilo.plan import Plan
from medsilo.supermodel import GLOBAL, THRESHOLDS, Origin, SuperModel, Tuning, assemble, tune
from medsilo.tasks.base import Task

FOLDER = "supermodel"
FACT = "super_model"  # under which a site tells of it
Batches = Iterator[tuple[Tensor, Tensor]]


# ---------------------------------------------------------------------------------------------------- at a site
def at_site(plan: Plan, modules: Modules, shown: Collection[str]) -> SuperModel:
    """The super model of what a site was given; `shown` are the sites whose own personal models are among it."""
    experts = zip(plan.participation.sites, modules["experts"].children(), strict=True)
    personal = {site: model.state_dict() for site, model in experts if site in shown}
    return _assemble(plan, modules, modules["global"].state_dict(), personal, modules["selector"].state_dict(), None)


@torch.no_grad()
def score(model: SuperModel, data: Batches, task: Task, compute: Compute, stop: Callable[[], None]) -> dict[str, Any]:
    """What a site tells of its validation cases: how often each model was chosen, and, where there is a threshold to
    be found, the summed score for each that is tried. Two passes over the cases, however many are tried."""
    chosen: Counter[str] = Counter()
    sums = dict.fromkeys(THRESHOLDS, 0.0)
    for inputs, targets in data:
        stop()
        with compute.cast():
            output, names, confidence = model.answer(inputs)
            common = model.expert(GLOBAL)(inputs) if model.rule == "threshold" else output
        by_choice, by_all = (task.case_scores(scores.float(), targets).double() for scores in (output, common))
        chosen.update(names)
        for threshold in THRESHOLDS:
            sums[threshold] += float(torch.where(confidence > threshold, by_choice, by_all).sum())
    if not all(map(math.isfinite, sums.values())):
        raise Refused("the super model's score on this site's validation cases is no number")
    return {"chosen": dict(chosen), "sums": list(sums.values()) if model.rule == "threshold" else []}


def settle(folder: Path, curve: list[list[float]]) -> SuperModel:
    """The site's own super model with the threshold that all sites' validation cases speak for."""
    model = SuperModel.load(folder)
    if curve and model.origin:
        tuning = Tuning(tuple((gamma, int(cases), mean) for gamma, cases, mean in curve))
        model.threshold, model.origin = tuning.threshold, replace(model.origin, tuning=tuning)
        model.save(folder)
    return model


class Watched(nn.Module):
    """A super model that counts whose model answers."""

    def __init__(self, model: SuperModel) -> None:
        super().__init__()
        self.model = model
        self.chosen: Counter[str] = Counter()

    def forward(self, inputs: Tensor) -> Tensor:
        output, names, _ = self.model.answer(inputs)
        self.chosen.update(names)
        return output


# ---------------------------------------------------------------------------------------------------- at the server
def at_server(
    plan: Plan, layout: Modules, mixers: Mapping[str, Mixer], agreed: Collection[str], tuning: Tuning | None
) -> SuperModel:
    """The super model that holds the personal models of those that agreed."""
    sites = plan.participation.sites
    common, selector = (mixers[group].current(sites[0]) for group in ("global", "selector"))
    personal = {site: mixers["personal"].current(site) for site in sites if site in agreed}
    return _assemble(plan, layout, common, personal, selector, tuning)


def tuned(plan: Plan, replies: Mapping[str, Parcel]) -> Tuning | None:
    """The threshold from the pooled counts of the sites that trained; None where the rule has none."""
    told = [replies[site].facts[FACT] for site in plan.participation.sites if site in replies]
    if not told[0]["sums"]:
        return None
    cases = sum(sum(facts["chosen"].values()) for facts in told)
    sums = (math.fsum(column) for column in zip(*(facts["sums"] for facts in told), strict=True))
    return tune({gamma: (cases, total) for gamma, total in zip(THRESHOLDS, sums, strict=True)})


def check(told: Any, sites: Collection[str], thresholds: int) -> None:
    """Raises Refused unless a site tells of its cases what it should: counts by model, and so many sums of scores."""
    if not isinstance(told, dict):
        raise Refused("it says nothing of the super model")
    chosen, sums = told.get("chosen"), told.get("sums")
    if not isinstance(chosen, dict) or not chosen or not all(type(n) is int and n > 0 for n in chosen.values()):
        raise Refused("it does not say how often each model was chosen")
    same_names("chosen", {*chosen, GLOBAL, *sites}, {GLOBAL, *sites})
    if not isinstance(sums, list) or len(sums) != thresholds:
        raise Refused(f"it does not give {thresholds} sums of scores")
    if not all(type(total) is float and math.isfinite(total) for total in sums):
        raise Refused("a sum of its scores is no number")


def _assemble(
    plan: Plan,
    modules: Modules,
    common: Mapping[str, Tensor],
    personal: Mapping[str, Mapping[str, Tensor]],
    selector: Mapping[str, Tensor],
    tuning: Tuning | None,
) -> SuperModel:
    choice = plan.method.choice(modules)
    assert choice is not None
    threshold = None if choice.rule != "threshold" else tuning.threshold if tuning else 0.0
    origin, sites = Origin(plan, choice.selector, tuning), plan.participation.sites
    return assemble(origin, common, personal, selector, threshold, sites=sites, rule=choice.rule)
