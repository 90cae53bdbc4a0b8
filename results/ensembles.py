"""Score ensembles of single-site models on every hospital's test cases; an ensemble averages the probabilities of its
models.

An ensemble needs only the training of single-site models and one exchange of these models. Survival models form no
ensemble, because their risks are not comparable.
"""

from medsilo.core.errors import MedsiloError
from medsilo.federation.site_context import SiteContext
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings
from medsilo_lab.deploy.source import Source
from medsilo_lab.study.cells import Cell
from medsilo_lab.study.evidence import Scores
from medsilo_lab.study.scores import SiteTest
from results.cross import Judge


def ensemble_scores(cell: Cell, settings: SiteSettings) -> dict[str, Scores] | None:
    """Return the score at each site of the ensemble of a run's single-site models, or None if these models form no
    ensemble.
    """
    plan, sites = cell.plan, sorted(cell.plan.participation.everyone)
    if not plan.task.goal.by_case:
        return None
    members = [Source.open(paths.site_folder(cell.folder, site)) for site in sites]
    network, metric, found = Source.together(members).network, plan.task.goal.metric, {}
    for site in sites:
        place = paths.site_folder(cell.folder, site)
        at = Judge.of(SiteContext(plan, site, sites, settings.of(site), place))
        alone = SiteTest.read(cell.folder, site, metric).scores
        values = at.case_scores(network)
        if len(values) != alone.cases:
            told = f"{cell.name}: {site} has other test cases than its run had; give the run's data, or repeat it"
            raise MedsiloError(told)
        found[site] = Scores(values, alone.patients)
    return found
