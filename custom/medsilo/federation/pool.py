"""Central training: one model on all hospitals' pooled training data, tested at every hospital."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from medsilo.federation.participant import Measure, Participant, Stop
from medsilo.federation.summary import tested_as
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.metrics import Measures, added
from medsilo.tasks.task import Cases, SiteData

POOL = "pooled"


class Pool(Participant):
    """The site that has everything. Scores are means over the hospitals, as a federated method's are."""

    def __init__(self, plan: Plan, hospitals: dict[str, Participant], settings: SiteSettings, folder: Path) -> None:
        parts = ("train", "validation", "test")
        pooled = SiteData(*(_together([getattr(h.data, part) for h in hospitals.values()]) for part in parts))
        self.hospitals = hospitals
        self.scores: dict[str, list[tuple[float, float, Measures]]] = {site: [] for site in hospitals}
        super().__init__(plan, POOL, [POOL], settings, folder, pooled)

    def _evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measure: Measure | None = None
    ) -> tuple[float, float, Measures]:
        which = "test" if part is self.data.test else "validation"
        for site, hospital in self.hospitals.items():
            self.scores[site].append(super()._evaluate(getattr(hospital.data, which), stop, model, measure))
        losses, scores, measures = zip(*(scores[-1] for scores in self.scores.values()), strict=True)
        together = {name: torch.cat([measured[name] for measured in measures]) for name in measures[0]}
        return sum(losses) / len(losses), sum(scores) / len(scores), together


def _together(parts: list[Dataset]) -> Dataset:
    if all(isinstance(part, Cases) for part in parts):
        cases: list[Cases] = parts  # type: ignore[assignment]
        inputs, targets = torch.cat([c.inputs for c in cases]), torch.cat([c.targets for c in cases])
        return Cases(inputs, targets, [patient for c in cases for patient in c.patients])
    return ConcatDataset(parts)


def spread_over_hospitals(pool: Pool, summary: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The pool's summary as the hospitals see it: their own cases, curves and test scores."""
    inner = summary["sites"][POOL]
    selected = summary["selected"]["rounds"][POOL]
    sites, tested = {}, {}
    for site, hospital in pool.hospitals.items():
        *curve, test = pool.scores[site]
        tested[site] = hospital.tested(selected, *test)
        validation = [score for _, score, _ in curve]
        sites[site] = {
            **inner,
            "cases": hospital.cases,
            "classes": hospital.classes(),
            "validation": validation,
            **tested_as(plan.task, tested[site]),
        }
    told = [facts["test"] for facts in sites.values() if facts["test"][plan.task.metric] is not None]
    total = sum(test["cases"] for test in told)
    pooled = sum(test[plan.task.metric] * test["cases"] for test in told)
    return {
        **summary,
        "plan_hash": plan.hash,
        "agreed": {**summary["agreed"], "sites": list(sites), "minimum": len(sites)},
        "selected": {"by": "mean", "rounds": dict.fromkeys(sites, selected)},
        "sites": sites,
        "pooled_test": pooled / total if total else None,
        "pooled": plan.task.figures(added(parcel.facts["counts"] for parcel in tested.values())),
    }
