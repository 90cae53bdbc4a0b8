"""Central training: one model on all hospitals' pooled training data, tested at every hospital."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset

from medsilo.federation.participant import Participant, Stop
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.base import Cases, SiteData

POOL = "pooled"


class Pool(Participant):
    """The site that has everything. Scores are means over the hospitals, as a federated method's are."""

    def __init__(self, plan: Plan, hospitals: dict[str, Participant], settings: SiteSettings, folder: Path) -> None:
        parts = ("train", "validation", "test")
        pooled = SiteData(*(_together([getattr(h.data, part) for h in hospitals.values()]) for part in parts))
        self.hospitals = hospitals
        self.scores: dict[str, list[tuple[float, float, int]]] = {site: [] for site in hospitals}
        super().__init__(plan, POOL, [POOL], settings, folder, pooled)

    def _evaluate(self, part: Dataset, stop: Stop) -> tuple[float, float, int]:
        which = "test" if part is self.data.test else "validation"
        for site, hospital in self.hospitals.items():
            self.scores[site].append(super()._evaluate(getattr(hospital.data, which), stop))
        latest = [scores[-1] for scores in self.scores.values()]
        losses, scores, cases = zip(*latest, strict=True)
        return sum(losses) / len(losses), sum(scores) / len(scores), sum(cases)


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
    sites = {}
    for site, hospital in pool.hospitals.items():
        *curve, (loss, score, cases) = pool.scores[site]
        test = {plan.task.metric: score, "loss": loss, "cases": cases}
        validation = [value for _, value, _ in curve]
        sites[site] = {**inner, "cases": hospital.cases, "validation": validation, "test": test}
    total = sum(facts["test"]["cases"] for facts in sites.values())
    pooled = sum(facts["test"][plan.task.metric] * facts["test"]["cases"] for facts in sites.values())
    return {
        **summary,
        "plan_hash": plan.hash,
        "agreed": {**summary["agreed"], "sites": list(sites), "minimum": len(sites)},
        "selected": {"by": "mean", "rounds": dict.fromkeys(sites, selected)},
        "sites": sites,
        "pooled_test": pooled / total,
    }
