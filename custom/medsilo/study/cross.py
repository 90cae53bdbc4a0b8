"""Models of finished runs on test data: of every site, where all were on one machine, or of a hospital elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import ConcatDataset

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, write_json
from medsilo.core.tensors import Tensors
from medsilo.deploy.source import Source, open_source
from medsilo.deploy.together import answering_together
from medsilo.federation.disclosure import Disclosure, finite
from medsilo.federation.exact import ExactScores, ExactTest
from medsilo.federation.participant import Participant
from medsilo.federation.protection import Protection
from medsilo.federation.seams import Place
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.runs.record import Record
from medsilo.runs.schema import Cross, Summary
from medsilo.site.book import PARTS
from medsilo.site.settings import SiteSettings, read_settings_of_all
from medsilo.tasks.folds import Dealt, together
from medsilo.tasks.metrics import Measures
from medsilo.tasks.task import Cases, SiteData, labels_of, patients_of

Scores = dict[str, float | None]  # by site
TOLERANCE = 1e-6  # between a site's score in the summary and the same score again


def cross(run_folder: Path, settings: SiteSettings | None = None) -> dict[str, Scores]:
    """The score of every site's best model on every site's test data, {whose model: {whose data: score}}.

    It is written to the run folder's cross.json. settings: where the data are, by default those of the run itself.
    """
    summary = finished_run(run_folder)
    plan, sites = load_plan(run_folder / paths.PLAN), summary.agreed.sites
    absent = [site for site in sites if not _model_of(run_folder, site).is_file()]
    if absent:
        raise MedsiloError(
            f"run {run_folder.resolve().name} has no model of {', '.join(absent)}: its sites keep their models and "
            "data, so nobody can compare them; only a run of federated sites in the simulator or in process has them "
            "on one machine"
        )
    settings = settings or run_settings(run_folder)
    settings.check_sites(plan.participation.everyone)
    scores: dict[str, Scores] = {site: {} for site in sites}
    for site in sites:  # one site's data at a time
        at = _Judge(Place(plan, site, sites, settings.of(site), paths.site_folder(run_folder, site)))
        for owner in sites:
            tensors, _ = load_tensors(_model_of(run_folder, owner))
            scores[owner][site] = at.score(at.model_with(tensors))
        same_as_before(site, scores[site][site], summary)
    found = Cross(metric=plan.task.goal.metric, plan_hash=plan.hash, scores=scores)
    write_json(run_folder / paths.CROSS, found.as_json())
    return scores


class _Judge(Participant):
    """A site that scores models which came from elsewhere on its test data."""

    def model_with(self, tensors: Tensors) -> nn.Module:
        """Return the study's model as another site has it, in place of this site's own."""
        self.state.model.load_state_dict(tensors)
        return self.state.model

    def score(self, model: nn.Module) -> float | None:
        """Return a model's score on this site's test data."""
        compute, task = self.state.compute, self.place.plan.task
        with compute.reproducible(self.place.plan.seed):
            model = model.to(compute.device)
            return finite(self.evaluation.evaluate(self.data.test, lambda: None, model, task.goal.measuring)[1])


def finished_run(run_folder: Path) -> Summary:
    """Return the summary of a run that came to its end; raises where it did not."""
    name = run_folder.resolve().name
    if not (run_folder / paths.PLAN).is_file():
        raise MedsiloError(f"{name} is no run's folder; give one under runs/", str(run_folder))
    summary = Record(run_folder).summary()
    if summary is None or not summary.finished:
        raise MedsiloError(
            f"run {name} has not finished, and its models are not ready to compare; run 'medsilo resume' on it first"
        )
    return summary


def run_settings(run_folder: Path) -> SiteSettings:
    """Return what the run's sites computed with: those of the simulator, which keeps them, or the defaults."""
    return read_settings_of_all(run_folder / paths.NVFLARE / "local")


def _model_of(run_folder: Path, site: str) -> Path:
    return paths.site_folder(run_folder, site) / paths.BEST


def same_as_before(site: str, score: float | None, summary: Summary) -> None:
    """Raise where a model's score on its own site's test data is not the summary's, if that has it."""
    known = summary.score(site) if summary.sites[site].test else score
    if score != known and (score is None or known is None or abs(score - known) > TOLERANCE):
        raise MedsiloError(
            f"{site}'s model has {summary.metric} {score} on its own test data, but {known} in the run's summary: "
            "the data or medsilo are not those of the run; give its data (--data, --settings), or run it again"
        )


def committee_scores(runs: Sequence[Path], settings: SiteSettings | None = None) -> tuple[Scores, dict[str, Scores]]:
    """Return the test scores of these runs' models together, and of each run's alone, {run: {site: score}}.

    settings: where the data are, by default those of the first run.
    """
    if len(runs) < 2:
        raise MedsiloError("one model alone is no committee; give the folders of two runs or more")
    if len({run.name for run in runs}) < len(runs):
        raise MedsiloError("two of these runs have the same name; give folders of different names, each once")
    summaries = {run: finished_run(run) for run in runs}
    sites = list(summaries[runs[0]].agreed.sites)
    for run, summary in summaries.items():
        if list(summary.agreed.sites) != sites:
            raise MedsiloError(f"run {run.name} has other hospitals than the first; give runs of one federation")
    plan, settings = load_plan(runs[0] / paths.PLAN), settings or run_settings(runs[0])
    settings.check_sites(plan.participation.everyone)
    together: Scores = {}
    alone: dict[str, Scores] = {run.name: {} for run in runs}
    for site in sites:  # one site's data at a time
        sources = [open_source(paths.site_folder(run, site)) for run in runs]  # as the hospital has them
        committee = answering_together(sources)
        at = _Judge(Place(plan, site, sites, settings.of(site), paths.site_folder(runs[0], site)))
        for run, source in zip(runs, sources, strict=True):
            alone[run.name][site] = at.score(source.network)
            same_as_before(site, alone[run.name][site], summaries[run])
        together[site] = at.score(committee.network)
    return together, alone


# ---------------------------------------------------------------------- at a hospital that was no part of the study
@dataclass(frozen=True)
class Judged:
    """A model's scores over all of a hospital's cases: each case's, which stay there, and what of them may leave."""

    measures: Measures
    patients: Sequence[str]
    told: Mapping[str, Any]
    mean: Callable[[float], float | None]  # a further mean over all cases, from 0 to 1, as it may leave; it is counted


class CaseLook(Protocol):
    """Sees the cases of a hospital as a model answers them. cases: their places among all."""

    def __call__(self, source: Source, inputs: Tensor, output: Tensor, target: Tensor, cases: list[int]) -> None: ...


def judged(
    sources: Sequence[Source],
    site: str,
    settings: SiteSettings,
    folder: Path,
    lead: str = "",
    looks: Sequence[CaseLook | None] = (),
) -> list[Judged]:
    """Score models of one task on all cases of a hospital that need not have been part of their studies.

    folder: the hospital's; what it answers is counted there, or where its settings say, as in a study. lead: who asks.
    """
    compute = settings.compute()
    found: list[Judged] = []
    data: SiteData | None = None
    for source, look in zip_longest(sources, looks):
        participation = source.plan.participation.model_copy(update={"unseen": (site,)})
        plan = source.plan.model_copy(update={"participation": participation, "privacy": None})
        place = Place(plan, site, [site], settings, paths.site_folder(folder, site), lead)
        if data is None:
            protection = Protection(place)
            protection.admit()
            data = _all_tested(plan.task.site_data(site, [site], plan.seed, protection.source()))
        judge = _Judge(place, data)
        with compute.reproducible(plan.seed):
            model = source.network.to(compute.device)
            scores = ExactScores(*judge.evaluation.evaluate(data.test, lambda: None, model, plan.task.goal.measuring))
            judge.evaluation.draw_found(model, model, scores.measures, place.folder)
            if look:
                for seen in judge.evaluation.seen(data.test, model):
                    look(source, *seen)
        told = judge.disclosure.told(ExactTest(0, scores, None, None))
        tells = partial(_mean, judge.disclosure, told["test"] is not None)
        found.append(Judged(scores.measures, patients_of(data.test), told, tells))
    return found


def _mean(disclosure: Disclosure, may_leave: bool, value: float) -> float | None:
    """Return a mean over the test cases as it is told; None where none may leave."""
    if not may_leave:
        return None
    disclosure.protection.note(test=1)
    return disclosure.settings.rounded(disclosure.resolution["test"].mean(value, 0, 1))


def _all_tested(data: SiteData) -> SiteData:
    """Return the same cases, all of them for the test: none of them has trained the model."""
    parts = [getattr(data, part) for part in PARTS]
    whole: ConcatDataset = ConcatDataset([part for part in parts if len(part)])
    patients = patients_of(whole)
    if all(isinstance(part, Cases) for part in parts):
        inputs, targets = together(parts)
        test = Cases(inputs, targets, patients)
    else:
        test = Dealt(whole, range(len(whole)), patients, labels_of(whole))  # type: ignore[assignment]
    nobody = Dealt(whole, [], patients, labels_of(whole))
    return replace(data, train=nobody, validation=nobody, test=test)
