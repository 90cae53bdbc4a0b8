"""Every site's model on every site's test data, after a run whose sites were all on one machine."""

from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, write_json
from medsilo.federation.participant import Participant
from medsilo.plan import load_plan
from medsilo.runs import paths
from medsilo.runs.record import Record
from medsilo.runs.schema import Cross, Summary
from medsilo.site.settings import SiteSettings, read_settings_of_all

TOLERANCE = 1e-6  # between a site's score in the summary and the same score again


def cross(run_folder: Path, settings: SiteSettings | None = None) -> dict[str, dict[str, float | None]]:
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
    scores: dict[str, dict[str, float | None]] = {site: {} for site in sites}
    for site in sites:  # one site's data at a time
        at = Participant(plan, site, sites, settings.of(site), paths.site_folder(run_folder, site))
        for owner in sites:
            tensors, facts = load_tensors(_model_of(run_folder, owner))
            scores[owner][site] = at.score(at.model_with(tensors), facts.get("postprocessing", {}))
        same_as_before(site, scores[site][site], summary)
    found = Cross(metric=plan.task.metric, plan_hash=plan.hash, scores=scores)
    write_json(run_folder / paths.CROSS, found.as_json())
    return scores


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
            "the data or medsilo are not those of the run; give its data (--data, --site-config), or run it again"
        )
