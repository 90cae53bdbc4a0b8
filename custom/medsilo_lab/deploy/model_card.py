"""Write the model card of an exported model, for people and programs. The card contains only facts that hospitals have
disclosed.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import log, sqrt
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, Template, Undefined

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json, write_text
from medsilo.core.package import ENGINE, facts_of
from medsilo.deploy.supermodel import SuperModel
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import Summary
from medsilo.runs.score import Interval, Score, interval_text, number_text
from medsilo.tasks.segmentation import Segmentation
from medsilo_lab.deploy.source import Source
from medsilo_lab.report.class_rates import by_class, wilson
from medsilo_lab.report.read import read
from medsilo_lab.report.run_warnings import learning

CARD, CARD_DATA = "MODEL_CARD.md", "model_card.json"
LEVEL = 0.95
MEANS = ("dice", "closeness")  # metrics that are the mean of a value per case, which is between 0 and 1
INTENDED_USE = (
    "Research and evaluation of the task named above, on images like those of the hospitals listed; not a medical "
    "device. A person who can judge the result looks at each one before it is used."
)
LIMITS = (
    "It was trained and validated on the hospitals above only: measure it on cases of your own first.",
    "Scores are over test cases of the same hospitals; other scanners, protocols and patients may give worse ones.",
    "A score is a mean: it says nothing about rare cases and small groups of patients.",
)
OF_A_SUPER_MODEL = (
    "The selector compares appearance with the hospitals it was trained at. An image from elsewhere may resemble one "
    "of them and still need another model. Low confidence is a warning; high confidence proves nothing.",
    "A hospital's personal model follows that hospital's way of annotating.",
)
RULES = {
    "threshold": "A selector looks at each image and says which hospital's images it resembles. Where its probability "
    "is strictly above gamma = {gamma}, that hospital's personal model answers, else the global model.",
    "argmax": "A selector looks at each image and says whose model does best on such images: the global one or a "
    "hospital's personal one. That model answers.",
    "mixture": "All models answer, and a selector says for each image by what shares their probabilities are mixed.",
}


def write_card(source: Source, folder: Path) -> None:
    facts = card_facts(source)
    write_json(folder / CARD_DATA, facts)
    write_text(folder / CARD, template("card").render(facts))


def template(name: str) -> Template:
    places = FileSystemLoader(Path(__file__).parent)
    texts = Environment(loader=places, undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    texts.filters |= {"told": _shown, "interval": interval_text, "rate": _rate}
    texts.policies["json.dumps_kwargs"] = {}
    return texts.get_template(f"{name}.template")


def card_facts(source: Source) -> dict[str, Any]:
    plan, summary, model = source.plan, _summary(source), source.network
    results = {**summary.sites, **summary.evaluation_sites} if summary else {}
    goal, super_model = plan.task.goal, model if isinstance(model, SuperModel) else None
    lacking = super_model.origin.absent if super_model and super_model.origin else {}
    return {
        "schema": 1,
        "model": source.facts,
        "task": plan.task.name,
        "task_title": plan.task.title,
        "synthetic": plan.task.synthetic,
        # the first label is the background, and is left out
        "labels": list(goal.structures if goal.overlaps else goal.label_names[1:])
        if isinstance(goal, Segmentation)
        else list(goal.label_names),
        "method": plan.algorithm.name,
        "method_title": plan.algorithm.title,
        "network": plan.network.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "round": source.round,
        "rounds": {"planned": plan.rounds, "done": summary.rounds.done if summary else None},
        "seed": plan.seed,
        "plan_hash": plan.hash,
        "trained_with": summary.as_json()["packages"] if summary else None,
        "exported_with": facts_of(ENGINE),
        "data": {site: result.cases for site, result in results.items()},
        # hospitals that agreed that their personal models are part of the super model
        "personal": list(super_model.agreed if super_model else ()),
        "absent": {site: result.absent for site, result in results.items() if result.absent}
        or {site: list(names) for site, names in lacking.items()},
        "scores": {site: _score(summary, site) for site in results} if summary else {},
        "classes": {
            site: [rates._asdict() for rates in own]
            for site, result in results.items()
            if (own := by_class(result, goal.label_names))
        },
        "mean_score": summary.mean_test if summary else None,
        "pooled_score": summary.pooled_test if summary else None,
        "means": {"mean": str(summary.mean_score), "weighted by cases": str(summary.pooled_score)} if summary else {},
        "warnings": _warnings(source) if summary else [],
        "metric": summary.metric if summary else plan.task.goal.metric,
        "level": LEVEL,
        "evaluation_sites": sorted(summary.evaluation_sites) if summary else [],
        "privacy": plan.privacy.model_dump(mode="json") if plan.privacy else None,
        "masked": summary.details.secure_aggregation.as_json()
        if summary and summary.details.secure_aggregation
        else None,
        "super_model": _super_model(super_model) if super_model else [],
        "intended_use": INTENDED_USE,
        "limits": [*(OF_A_SUPER_MODEL if super_model else ()), *LIMITS],
    }


def _super_model(model: SuperModel) -> list[str]:
    kept = ", ".join(site for site in model.sites if site not in model.agreed) or "none"
    return [
        f"One global model, {len(model.agreed)} personal models and a selector. "
        + RULES[model.rule].format(gamma=model.threshold),
        f"Hospitals that agreed to share their personal model: {', '.join(model.agreed) or 'none'}; represented by the "
        f"global model: {kept}.",
    ]


def _summary(source: Source) -> Summary | None:
    if source.run is None or not (source.run / paths.SUMMARY).is_file():
        return None
    try:
        summary = read_summary(source.run)
    except MedsiloError:
        return None
    return summary if summary.plan_hash == source.plan.hash else None


def _score(summary: Summary, site: str) -> dict[str, Any] | None:
    """Return the test result that a hospital disclosed, or None if the model was not tested at this hospital."""
    result = summary.sites.get(site) or summary.evaluation_sites[site]
    if result.test is None:
        return None
    told = summary.score_at(site)
    known = {"score": summary.score(site), "cases": result.test.get("cases"), "step": result.steps.get("test")}
    return known | {"interval": interval_of(summary.metric, told), "shown": str(told)} | told.as_json()


def _warnings(source: Source) -> list[str]:
    if source.run is None:
        return []
    with suppress(MedsiloError):  # if this machine lacks some files of the run, the card has no warnings
        found = read(source.run, whole=False)
        return [str(one) for one in learning({found.label: [found]})]
    return []


def interval_of(metric: str, score: Score) -> Interval | None:
    """Return a 95 % confidence interval of a score. If only a range of the score is known, return the smallest interval
    that contains the confidence intervals of both ends of the range.

    If no confidence interval can be calculated from the score and the number of cases, return None.
    """
    if score.low is None or score.high is None or not score.n or metric not in ("accuracy", *MEANS):
        return None
    ends = _interval_of(metric, score.low, score.n), _interval_of(metric, score.high, score.n)
    return ends[0][0], ends[1][1]


def _interval_of(metric: str, score: float, cases: int) -> Interval:
    if metric == "accuracy":
        low, high = wilson(min(round(score * cases), cases), cases)
        return round(low, 4), round(high, 4)
    half = sqrt(log(2 / (1 - LEVEL)) / (2 * cases))
    return round(max(score - half, 0), 4), round(min(score + half, 1), 4)


def _rate(rate: Mapping[str, Any], of: str) -> str:
    """Format the rate of a class and its confidence interval, with the digits that the number of cases justifies."""
    if rate[of] is None:
        return _shown(None)
    ends = rate["intervals"].get(of)
    return f"{number_text(rate[of], rate['cases'])} ({interval_text(ends, rate['cases'])})" if ends else _shown(None)


def _shown(value: float | Undefined | None, form: str = "%d") -> str:
    return "suppressed" if value is None or isinstance(value, Undefined) else form % value
