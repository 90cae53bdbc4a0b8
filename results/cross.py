"""Score the models of finished runs on the test data of every site, if all data are on this machine.

python -m results.cross runs/local                 # every site's model at every site
python -m results.cross runs/adafed runs/fedbn     # the runs' models together, beside each run's alone
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Self

import numpy as np
from torch import nn

from medsilo.cli.options import run_settings, settings_of
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.core.tensors import Tensors
from medsilo.federation.disclosure import finite
from medsilo.federation.participant import Participant, parts_of
from medsilo.federation.site_context import SiteContext
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.runs.schema import Summary
from medsilo.site.settings import ALL_MINE, SiteSettings
from medsilo.tasks.metrics import Measures
from medsilo_lab.deploy.source import Source
from medsilo_server.record import Record

Scores = dict[str, float | None]
TOLERANCE = 1e-6  # largest difference between a site's score in the summary and the recomputed score


def finished_run(run_folder: Path) -> Summary:
    """Return a run's summary, or raise an error if the run has not finished."""
    name = run_folder.resolve().name
    if not (run_folder / paths.PLAN).is_file():
        raise MedsiloError(f"{name} is no run's folder; give one under runs/", str(run_folder))
    summary = Record(run_folder).finished()
    if not summary:
        raise MedsiloError(
            f"run {name} has not finished, and its models are not ready to compare; run 'medsilo resume' on it first"
        )
    return summary


class Judge(Participant):
    @classmethod
    def of(cls, context: SiteContext) -> Self:
        return cls(context, parts_of(context))

    def model_with(self, tensors: Tensors) -> nn.Module:
        self.state.model.load_state_dict(tensors)
        return self.state.model

    def score(self, model: nn.Module) -> float | None:
        return finite(self._tested(model)[1])

    def case_scores(self, model: nn.Module) -> np.ndarray:
        return self._tested(model)[2][self.context.plan.task.goal.metric].numpy()

    def _tested(self, model: nn.Module) -> tuple[float, float, Measures]:
        compute, task = self.state.compute, self.context.plan.task
        with compute.reproducible(self.context.plan.seed):
            model = model.to(compute.device)
            return self.evaluation.evaluate(self.data.test, lambda: None, model, task.goal.measuring)


def cross(run_folder: Path, settings: SiteSettings | None = None) -> dict[str, Scores]:
    """Return the score of every site's best model on every site's test data, {site of the model: {site of the data:
    score}}.

    Args:
        settings: All sites' settings with the folders of their data; by default, the settings of the run.
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
    for site in sites:  # memory holds the data of one site at a time
        at = Judge.of(SiteContext(plan, site, sites, settings.of(site), paths.site_folder(run_folder, site)))
        for owner in sites:
            tensors, _ = load_tensors(_model_of(run_folder, owner))
            scores[owner][site] = at.score(at.model_with(tensors))
        same_as_before(site, scores[site][site], summary)
    return scores


def _model_of(run_folder: Path, site: str) -> Path:
    return paths.site_folder(run_folder, site) / paths.BEST


def same_as_before(site: str, score: float | None, summary: Summary) -> None:
    """Raise an error if a model's score on its own site's test data differs from the summary's score."""
    known = summary.score(site) if summary.sites[site].test else score
    if score != known and (score is None or known is None or abs(score - known) > TOLERANCE):
        raise MedsiloError(
            f"{site}'s model has {summary.metric} {score} on its own test data, but {known} in the run's summary: "
            "the data or medsilo are not those of the run; give its data (--data, --settings), or run it again"
        )


def committee_scores(runs: Sequence[Path], settings: SiteSettings | None = None) -> tuple[Scores, dict[str, Scores]]:
    """Return test scores {run: {site: score}} of each run's model, and of the ensemble of all runs' models.

    Args:
        settings: All sites' settings with the folders of their data; by default, the settings of the first run.
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
    for site in sites:  # memory holds the data of one site at a time
        sources = [Source.open(paths.site_folder(run, site)) for run in runs]
        committee = Source.together(sources)
        at = Judge.of(SiteContext(plan, site, sites, settings.of(site), paths.site_folder(runs[0], site)))
        for run, source in zip(runs, sources, strict=True):
            alone[run.name][site] = at.score(source.network)
            same_as_before(site, alone[run.name][site], summaries[run])
        together[site] = at.score(committee.network)
    return together, alone


def table(corner: str, rows: Mapping[str, Scores]) -> str:
    told = {name: [*own.values(), fmean(known) if (known := _known(own)) else None] for name, own in rows.items()}
    heads = [corner, *next(iter(rows.values())), "mean"]
    first, widths = max(map(len, [corner, *rows])), [max(len(head), 5) for head in heads[1:]]
    lines = [heads, *([name, *("–" if one is None else f"{one:.3f}" for one in own)] for name, own in told.items())]
    return "\n".join(
        f"{line[0]:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths, strict=True))
        for line in lines
    )


def _known(scores: Scores) -> list[float]:
    return [score for score in scores.values() if score is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--device")
    given = parser.parse_args(arguments)
    try:
        before = run_settings(given.runs[0])
        settings = settings_of(given.device, given.data, given.settings, before, **ALL_MINE)
        if len(given.runs) == 1:
            print(table("model of", cross(given.runs[0], settings)))
        else:
            together, alone = committee_scores(given.runs, settings)
            print(table("models of", {**alone, "all together": together}))
    except MedsiloError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
