"""The scores of several runs' models that answer together, at every site, where all sites were on one machine."""

from collections.abc import Sequence
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.deploy.source import open_source
from medsilo.deploy.together import answering_together
from medsilo.federation.participant import Participant
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from medsilo.study.cross import finished_run, run_settings, same_as_before

Scores = dict[str, float | None]  # by site


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
        at = Participant(plan, site, sites, settings.of(site), paths.site_folder(runs[0], site))
        for run, source in zip(runs, sources, strict=True):
            alone[run.name][site] = at.score(source.network, source.facts.get("postprocessing", {}))
            same_as_before(site, alone[run.name][site], summaries[run])
        together[site] = at.score(committee.network)
    return together, alone
