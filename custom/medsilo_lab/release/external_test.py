"""Evaluate models on all cases of a hospital, whether or not the hospital participated in the models' studies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from medsilo.core.errors import Refused
from medsilo.federation.disclosure import finite
from medsilo.federation.participant import participant_of
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import ExactScores, ExactTest
from medsilo.federation.site_context import SiteContext
from medsilo.runs import paths
from medsilo.runs.schema import SiteResult
from medsilo.runs.score import Score
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData, dealt, patients_of
from medsilo_lab.deploy.source import Source
from medsilo_lab.study.evidence import Difference, Scores, compare
from medsilo_lab.study.scores import SiteTest
from medsilo_server.summary import tested_as


@dataclass(frozen=True)
class Judged:
    """A model's scores on all cases of a hospital. Exact scores stay at the hospital; rounded scores and counts may be
    sent.
    """

    test: SiteTest
    reported: Mapping[str, Any]
    leaving: Score
    exact: SiteResult  # exact results over all cases, which stay at the hospital
    labels: Sequence[str]
    seen: bool  # true if the hospital trained the model, so that some of the tested patients trained it

    @property
    def score(self) -> Score:
        """The exact score over all cases, which stays at the hospital."""
        known = finite(float(self.test.scores.values.mean()))
        return Score.told(known, self.test.scores.people, seen=self.seen, absent="undefined")

    def against(self, other: "Judged") -> Difference:
        return compare([{"here": self.test.scores}], [{"here": other.test.scores}])


def judged(
    sources: Sequence[Source],
    site: str,
    settings: SiteSettings,
    folder: Path,
    lead: str = "",
) -> list[Judged]:
    """Evaluate models of one task on all cases of a hospital.

    The test counts against the hospital's query budget, because its results may be disclosed. The budget is stored in
    the output folder `folder`, or in the folder of the hospital's settings.

    Args:
        lead: The person who requested the evaluation.
    """
    if refusal := settings.refuses(trains=False):
        raise Refused(refusal)
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
        judge = participant_of(place, data)
        with compute.reproducible(plan.seed):
            model = source.network.to(compute.device)
            scores = ExactScores(*judge.evaluation.evaluate(data.test, lambda: None, model, plan.task.goal.measuring))
            judge.evaluation.draw_found(model, model, scores.measures, place.folder)
        reported = {
            **judge.disclosure.disclose(ExactTest(0, scores, None, None)),
            "cases": judge.disclosure.told_cases.test,
        }
        step = judge.disclosure.steps.get("test", 0.0)
        seen = site in source.plan.participation.sites
        absent: Literal["undefined", "suppressed"] = (
            "undefined" if judge.disclosure.is_undefined("test") else "suppressed"
        )
        leaving = Score.told(reported["test"], reported["cases"], step, seen=seen, absent=absent)
        metric, whose = plan.task.goal.metric, np.unique(patients_of(data.test), return_inverse=True)[1]
        own = Scores(scores.measures[metric].numpy(), whose)
        counts = plan.task.goal.counts(scores.measures, patients_of(data.test), 1)
        facts = {"counts": counts, "test": finite(scores.score), "test_loss": scores.loss}
        exact = SiteResult(**tested_as(plan.task, facts, len(whose), None))
        test = SiteTest(metric, own, scores.measures)
        found.append(Judged(test, reported, leaving, exact, plan.task.goal.label_names, seen))
    return found


def _all_tested(data: SiteData) -> SiteData:
    """Return the data with all cases as test cases. If the hospital trained the model, the model's training cases are
    among them.
    """
    parts = [part for part in (getattr(data, part) for part in PARTS) if len(part)]
    nobody, test = dealt(parts, [[], range(sum(map(len, parts)))])
    return replace(data, train=nobody, validation=nobody, test=test)
