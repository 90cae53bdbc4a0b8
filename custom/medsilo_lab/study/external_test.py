"""Models that a hospital, which need not be part of their studies, scores on its own cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.federation.participant import Participant
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import ExactScores, ExactTest
from medsilo.federation.site_context import SiteContext
from medsilo.federation.summary import tested_as
from medsilo.runs import paths
from medsilo.runs.schema import SiteResult
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData, dealt, patients_of
from medsilo_lab.deploy.source import Source
from medsilo_lab.study.evidence import Difference, Scores, compare
from medsilo_lab.study.scores import SiteTest


@dataclass(frozen=True)
class Judged:
    """A model's scores over all of a hospital's cases: each case's, which stay there, and what of them may leave."""

    test: SiteTest
    reported: Mapping[str, Any]
    exact: SiteResult  # figures and decisions over all cases, which stay there
    labels: Sequence[str]  # of classes, in the model's order

    def against(self, other: "Judged") -> Difference:
        """Return how much better this model is than another on the same patients."""
        return compare([{"here": self.test.scores}], [{"here": other.test.scores}])


def judged(
    sources: Sequence[Source],
    site: str,
    settings: SiteSettings,
    folder: Path,
    lead: str = "",
) -> list[Judged]:
    """Score models of one task on all cases of a hospital that need not have been part of their studies.

    folder: the hospital's; what it answers is counted there, or where its settings say, as in a study. lead: who asks.
    """
    compute = settings.compute()
    found: list[Judged] = []
    data: SiteData | None = None
    for source in sources:
        participation = source.plan.participation.model_copy(update={"evaluation_sites": (site,)})
        plan = source.plan.model_copy(update={"participation": participation, "privacy": None})
        place = SiteContext(plan, site, [site], settings, paths.site_folder(folder, site), lead)
        if data is None:
            protection = Protection(place)
            protection.admit()
            data = _all_tested(plan.task.site_data(site, [site], plan.seed, protection.source()))
        judge = Participant(place, data)
        with compute.reproducible(plan.seed):
            model = source.network.to(compute.device)
            scores = ExactScores(*judge.evaluation.evaluate(data.test, lambda: None, model, plan.task.goal.measuring))
            judge.evaluation.draw_found(model, model, scores.measures, place.folder)
        reported = {
            **judge.disclosure.disclose(ExactTest(0, scores, None, None)),
            "cases": judge.disclosure.counted.test,
        }
        metric, whose = plan.task.goal.metric, np.unique(patients_of(data.test), return_inverse=True)[1]
        own = Scores(scores.measures[metric].numpy(), whose)
        counts = plan.task.goal.counts(scores.measures, patients_of(data.test), 1)
        facts = {"counts": counts, "test": scores.score, "test_loss": scores.loss}
        exact = SiteResult(**tested_as(plan.task, facts, len(whose), None))
        test = SiteTest(metric, own, scores.measures)
        found.append(Judged(test, reported, exact, plan.task.goal.label_names))
    return found


def _all_tested(data: SiteData) -> SiteData:
    """Return the same cases, all of them for the test: none of them has trained the model."""
    parts = [part for part in (getattr(data, part) for part in PARTS) if len(part)]
    nobody, test = dealt(parts, [[], range(sum(map(len, parts)))])
    return replace(data, train=nobody, validation=nobody, test=test)
