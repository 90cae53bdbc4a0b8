"""The end of a method that makes a super model: who is shown whose personal model, how gamma is found, what is kept."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medsilo.core.errors import Refused
from medsilo.deploy import GLOBAL, THRESHOLDS, Origin, Spacing, SuperModel, Tuning, assemble, tune
from medsilo.federation.checks import same_names
from medsilo.learning.loop import Compute
from medsilo.methods.base import Modules, Parcel
from medsilo.mixing.mixers import Mixer
from medsilo.plan import Plan
from medsilo.tasks.task import Task

FOLDER = "supermodel"
FACT = "super_model"  # under which a site tells of it
Batches = Iterator[tuple[Tensor, Tensor]]


# ---------------------------------------------------------------------------------------------------- at a site
def at_site(plan: Plan, modules: Modules, shown: Collection[str]) -> SuperModel:
    """The super model of what a site was given; `shown` are the sites whose own personal models are among it."""
    experts = zip(plan.participation.sites, modules["experts"].children(), strict=True)
    personal = {site: model.state_dict() for site, model in experts if site in shown}
    return _assemble(plan, modules, modules["global"].state_dict(), personal, modules["selector"].state_dict())


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


def untold(told: dict[str, Any]) -> dict[str, Any]:
    """What a site tells that has too few cases to tell of any: nothing, in the same form."""
    return {"chosen": {}, "sums": [0.0] * len(told["sums"])}


def spacing_of(images: Sequence[Sequence[float]], least: int) -> list[list[float]] | None:
    """What a site tells of its training images' spacing: the range along each axis, of at least so many images."""
    if len(images) < least:
        return None
    return [[min(along), max(along)] for along in zip(*images, strict=True)]


def settle(folder: Path, curve: list[list[float]], spacing: list[list[float]] | None) -> SuperModel:
    """The site's own super model with the threshold that all sites' validation cases speak for, and what they saw."""
    model = SuperModel.load(folder)
    assert model.origin
    model.origin = replace(model.origin, spacing=tuple((low, high) for low, high in spacing) if spacing else None)
    if curve:
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
    plan: Plan,
    layout: Modules,
    mixers: Mapping[str, Mixer],
    agreed: Collection[str],
    tuning: Tuning | None,
    spacing: Spacing | None,
) -> SuperModel:
    """The super model that holds the personal models of those that agreed."""
    sites = plan.participation.sites
    common, selector = (mixers[group].current(sites[0]) for group in ("global", "selector"))
    personal = {site: mixers["personal"].current(site) for site in sites if site in agreed}
    return _assemble(plan, layout, common, personal, selector, tuning, spacing)


def tuned(plan: Plan, replies: Mapping[str, Parcel]) -> Tuning | None:
    """The threshold from the pooled counts of the sites that trained; None where the rule has none or none tells."""
    told = _told(plan, replies)
    cases = sum(sum(facts["chosen"].values()) for facts in told)
    if not cases or not told[0]["sums"]:
        return None
    sums = (math.fsum(column) for column in zip(*(facts["sums"] for facts in told), strict=True))
    return tune({gamma: (cases, total) for gamma, total in zip(THRESHOLDS, sums, strict=True)})


def spacing(plan: Plan, replies: Mapping[str, Parcel]) -> Spacing | None:
    """The least and greatest spacing of the training images of all sites that tell; None where none does."""
    along = zip(*(ranges for facts in _told(plan, replies) if (ranges := facts.get("spacing"))), strict=False)
    return tuple((min(low for low, _ in axis), max(high for _, high in axis)) for axis in along) or None


def _told(plan: Plan, replies: Mapping[str, Parcel]) -> list[dict[str, Any]]:
    """What the sites that trained tell."""
    return [replies[site].facts[FACT] for site in plan.participation.sites if site in replies]


def check(told: Any, sites: Collection[str], thresholds: int, withheld: bool) -> None:
    """Raises Refused unless a site tells of its cases what it should: counts by model, so many sums of scores, and
    the range of its images' spacing or nothing."""
    if not isinstance(told, dict):
        raise Refused("it says nothing of the super model")
    chosen, sums = told.get("chosen"), told.get("sums")
    if (
        not isinstance(chosen, dict)
        or bool(chosen) == withheld
        or not all(type(n) is int and n > 0 for n in chosen.values())
    ):
        raise Refused("it does not say how often each model was chosen")
    same_names("chosen", {*chosen, GLOBAL, *sites}, {GLOBAL, *sites})
    if not isinstance(sums, list) or len(sums) != thresholds:
        raise Refused(f"it does not give {thresholds} sums of scores")
    if not all(type(total) is float and math.isfinite(total) for total in sums):
        raise Refused("a sum of its scores is no number")
    ranges = told.get("spacing")
    if ranges is not None and not (isinstance(ranges, list) and len(ranges) in (2, 3) and all(map(_is_range, ranges))):
        raise Refused("its spacing is no range of millimetres along two or three axes")


def _is_range(ends: Any) -> bool:
    known = isinstance(ends, list) and [type(end) for end in ends] == [float, float]
    return known and 0 < ends[0] <= ends[1] < math.inf


def _assemble(
    plan: Plan,
    modules: Modules,
    common: Mapping[str, Tensor],
    personal: Mapping[str, Mapping[str, Tensor]],
    selector: Mapping[str, Tensor],
    tuning: Tuning | None = None,
    spacing: Spacing | None = None,
) -> SuperModel:
    choice = plan.method.choice(modules)
    assert choice is not None
    threshold = None if choice.rule != "threshold" else tuning.threshold if tuning else 0.0
    origin, sites = Origin(plan, choice.selector, tuning, spacing), plan.participation.sites
    return assemble(origin, common, personal, selector, threshold, sites=sites, rule=choice.rule)
