"""Centralised training: one model learns from the pooled training data of all hospitals, and is tested on the data of
each hospital.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

from medsilo.federation.disclosure import Part, Told, finite
from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.participant import Participant, parts_of
from medsilo.federation.raw_results import ExactScores
from medsilo.federation.site_context import SiteContext
from medsilo.learning.compute import Compute, Stop
from medsilo.plan import Plan
from medsilo.runs.schema import Selection, SiteResult, Summary
from medsilo.site.query_budget import PARTS
from medsilo.tasks.metrics import Measures, added
from medsilo.tasks.site_data import SiteData, dealt
from medsilo_server.summary import counts_of, means, tested_as

POOL = "pooled"


class Pool(Participant):
    """The single site of centralised training, which has the pooled data of all hospitals. A score in centralised
    training is a mean over the hospitals' scores, as in federated training.
    """

    evaluation: AtHospitals

    def __init__(self, context: SiteContext, hospitals: dict[str, Participant]) -> None:
        parts = [[getattr(hospital.data, part) for hospital in hospitals.values()] for part in PARTS]
        pooled = SiteData(*(dealt(own, [range(sum(map(len, own)))])[0] for own in parts))
        self.hospitals = hospitals
        self.thresholds: dict[str, float | None] = {}
        scores = partial(AtHospitals, hospitals=hospitals)
        embeds = lambda *_: None  # noqa: E731  (the hospitals have made their embeddings)
        super().__init__(context, parts_of(context, pooled, evaluation=scores, embeds=embeds))

    def decisive(self, model: nn.Module, stop: Stop) -> None:
        found = {site: hospital.decisive(model, stop) for site, hospital in self.hospitals.items()}
        self.thresholds = {
            site: None if cases is None else self.hospitals[site].disclosure.threshold(cases)
            for site, cases in found.items()
        }


class AtHospitals(Evaluation):
    """An evaluation that calculates a separate score for each hospital."""

    def __init__(
        self, context: SiteContext, data: SiteData, compute: Compute, protected: bool, hospitals: dict[str, Participant]
    ) -> None:
        super().__init__(context, data, compute, protected)
        self.hospitals = hospitals
        self.scores: dict[str, list[tuple[float, float, Measures]]] = {site: [] for site in hospitals}

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        which: Part = "test" if part is self.data.test else "validation"
        for site, hospital in self.hospitals.items():
            self.scores[site].append(super().evaluate(getattr(hospital.data, which), stop, model, measuring))
        losses, scores, measures = zip(*(scores[-1] for scores in self.scores.values()), strict=True)
        defined = [
            score
            for hospital, score in zip(self.hospitals.values(), scores, strict=True)
            if not hospital.disclosure.is_undefined(which)
        ]
        together = {name: torch.cat([measured[name] for measured in measures]) for name in measures[0]}
        mean = sum(defined) / len(defined) if defined else math.nan
        return sum(losses) / len(losses), mean, together


def spread_over_hospitals(pool: Pool, summary: Summary, plan: Plan) -> Summary:
    """In the summary of centralised training, list the hospitals as sites, each with its number of cases, curves and
    test scores.
    """
    inner, selected = summary.sites[POOL], summary.selected.rounds[POOL]
    assert selected is not None
    sites: dict[str, SiteResult] = {}
    tested: dict[str, Told] = {}
    for site, hospital in pool.hospitals.items():
        *curve, test = pool.evaluation.scores[site]
        hospital.disclosure.write_cases(hospital.context.folder, test[2])
        told = tested[site] = hospital.disclosure.tested(selected, ExactScores(*test))
        scored = iter(curve)
        validation = [finite(next(scored)[1]) if plan.validates(rounds) else None for rounds in range(plan.rounds + 1)]
        sites[site] = inner.changed(
            cases=hospital.disclosure.cases,
            classes=hospital.disclosure.classes(),
            steps={part: step for part, step in hospital.disclosure.steps.items() if part == "test"},
            validation=validation,
            **tested_as(
                plan.task,
                told,
                hospital.disclosure.told_cases.test,
                pool.thresholds.get(site),
                hospital.disclosure.steps.get("test", 0.0),
                hospital.disclosure.counted.test,
            ),
        )
    counts = (counts_of(plan.task, told["counts"], pool.thresholds.get(site)) for site, told in tested.items())
    return summary.changed(
        plan_hash=plan.hash,
        agreed=summary.agreed.changed(sites=list(sites), minimum=len(sites)),
        selected=Selection(by="mean", rounds=dict.fromkeys(sites, selected)),
        sites=sites,
        pooled_test=means(plan.task, sites)["pooled_test"],
        pooled=plan.task.goal.figures(added(counts)),
    )
