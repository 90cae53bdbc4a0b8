"""The card of any exported model, for people and for programs: what a run released about it, and no more."""

from math import log, sqrt
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json, write_text
from medsilo.core.package import package_facts
from medsilo.deploy.source import Source
from medsilo.deploy.supermodel import Origin, SuperModel
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import SiteResult, Summary
from medsilo.tasks.segmentation import Segmentation

CARD, CARD_DATA = "MODEL_CARD.md", "model_card.json"
LEVEL = 0.95
TOGETHER = {"mean": "mean_score", "weighted by cases": "pooled_score"}
MEANS = ("dice", "closeness")  # scores that are means over cases, each between 0 and 1
INTERVALS = (
    "Intervals are worked out from score and number of test cases alone, which is all that hospitals release: "
    "Wilson's of an accuracy, Hoeffding's of a mean between 0 and 1, which holds for any distribution and is "
    "wide. They take cases as independent; several of one patient make them too narrow. Where each hospital has a "
    "model of its own, its score is that model's."
)
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
Interval = tuple[float, float]


def write_card(source: Source, folder: Path) -> None:
    """Write MODEL_CARD.md and model_card.json."""
    facts = card_facts(source)
    write_json(folder / CARD_DATA, facts)
    write_text(folder / CARD, _page(facts))


def card_facts(source: Source) -> dict[str, Any]:
    """Return everything that the card says."""
    plan, summary, model = source.plan, _summary(source), source.network
    results = {**summary.sites, **summary.unseen} if summary else {}
    package, goal = package_facts(), plan.task.goal
    return {
        "schema": 1,
        "model": source.facts,
        "task": plan.task.name,
        "task_title": plan.task.title,
        "synthetic": plan.task.synthetic,
        # without the background
        "labels": list(goal.structures if goal.overlaps else goal.label_names[1:])
        if isinstance(goal, Segmentation)
        else list(goal.label_names),
        "method": plan.algorithm.name,
        "method_title": plan.algorithm.title,
        "network": plan.network.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rounds": {"planned": plan.rounds, "done": summary.rounds.done if summary else None},
        "seed": plan.seed,
        "plan_hash": plan.hash,
        "trained_with": summary.package.as_json() if summary else None,
        "exported_with": {"version": package["version"], "hash": package["hash"]},
        "data": {site: result.cases for site, result in results.items()},
        "personal": list(getattr(model, "agreed", ())),  # models of hospitals' own that are in a super model
        "absent": {site: result.absent for site, result in results.items() if result.absent} or _lacking(model),
        "scores": {site: _score(result, summary.metric) for site, result in results.items()} if summary else {},
        "mean_score": summary.mean_test if summary else None,
        "pooled_score": summary.pooled_test if summary else None,
        "metric": summary.metric if summary else plan.task.goal.metric,
        "level": LEVEL,
        "unseen": sorted(summary.unseen) if summary else [],
        "privacy": plan.privacy.model_dump(mode="json") if plan.privacy else None,
        "sealing": summary.details.sealing.as_json() if summary and summary.details.sealing else None,
        "promised": source.card(),
        "super_model": _super_model(model),
        "intended_use": INTENDED_USE,
        "limits": [*(OF_A_SUPER_MODEL if isinstance(model, SuperModel) else ()), *LIMITS],
    }


def _lacking(model: Any) -> dict[str, list[str]]:
    """Return what a super model says that hospitals have not, where no summary does."""
    origin = model.origin if isinstance(model, SuperModel) else None
    return {site: list(names) for site, names in origin.absent.items()} if origin else {}


def _super_model(model: Any) -> list[str]:
    """Return how a super model answers, whose models are in it, and how gamma was found; nothing of another model."""
    if not isinstance(model, SuperModel) or model.origin is None:
        return []
    kept = ", ".join(site for site in model.sites if site not in model.agreed) or "none"
    return [
        f"One global model, {len(model.agreed)} personal models and a selector. "
        + RULES[model.rule].format(gamma=model.threshold),
        f"Hospitals that agreed to share their personal model: {', '.join(model.agreed) or 'none'}; represented by the "
        f"global model: {kept}.",
        *([] if model.threshold is None else [_gamma(model.threshold, model.origin)]),
    ]


def _gamma(threshold: float, origin: Origin) -> str:
    if origin.tuning is None or origin.tuning.threshold != threshold:
        return f"Gamma is {threshold:g}, as it was set; it was not tuned."
    rows = "\n".join(f"| {gamma:g} | {cases} | {score:.4f} |" for gamma, cases, score in origin.tuning.curve)
    metric, (low, high) = origin.plan.task.goal.metric, origin.tuning.plateau
    return (
        f"Gamma is {threshold:g}: the middle of the range from {low:g} to {high:g}, within which all values tried have "
        f"the best mean {metric} over the validation cases of all hospitals together.\n\n"
        f"| gamma | cases | mean {metric} |\n|---|---|---|\n{rows}"
    )


def _summary(source: Source) -> Summary | None:
    """Return the outcome of the run that made the model; None where its folder is not here."""
    if source.run is None or not (source.run / paths.SUMMARY).is_file():
        return None
    try:
        summary = read_summary(source.run)
    except MedsiloError:
        return None
    return summary if summary.plan_hash == source.plan.hash else None


def _score(result: SiteResult, metric: str) -> dict[str, Any] | None:
    """Return what a hospital released of its test; None where it was not tested."""
    if result.test is None:
        return None
    score, cases = result.test.get(metric), result.test.get("cases")
    interval = interval_of(metric, score, int(cases or 0)) if score is not None else None
    return {"score": score, "cases": cases, "interval": interval}


def interval_of(metric: str, score: float, cases: int) -> Interval | None:
    """Return a 95 % interval of a score over so many cases; None where none follows from these two numbers."""
    if cases < 1 or metric not in ("accuracy", *MEANS):
        return None
    if metric == "accuracy":
        from scipy.stats import binomtest

        found = binomtest(min(round(score * cases), cases), cases).proportion_ci(LEVEL, "wilson")
        return round(float(found.low), 4), round(float(found.high), 4)
    half = sqrt(log(2 / (1 - LEVEL)) / (2 * cases))
    return round(max(score - half, 0), 4), round(min(score + half, 1), 4)


def _page(facts: dict[str, Any]) -> str:
    synthetic = "\n**Trained on SYNTHETIC data: for trying out the software only.**\n" if facts["synthetic"] else ""
    limits = "\n".join(f"- {limit}" for limit in facts["limits"])
    promised = "\n".join(["\n## What is promised", *facts["promised"], ""]) if facts["promised"] else ""
    answers = "\n\n".join(["\n## How it answers", *facts["super_model"], ""]) if facts["super_model"] else ""
    trained = facts["trained_with"] or {}
    about = [
        ("what it is", facts["model"]["kind"]),
        ("finds", ", ".join(facts["labels"])),
        ("method", facts["method_title"]),
        ("network", f"{facts['network']}, {facts['parameters']:,} parameters"),
        ("rounds of training", facts["rounds"]["done"] or f"{facts['rounds']['planned']} planned"),
        ("plan hash", facts["plan_hash"]),
        ("trained with medsilo", f"{trained.get('version') or 'not recorded'} {(trained.get('hash') or '')[:12]}"),
    ]
    rows = "\n".join(f"| {name} | {str(value).strip()} |" for name, value in about)
    return f"""# Model card: {facts["task_title"]}
{synthetic}
| | |
|---|---|
{rows}
{answers}
## Intended use
{facts["intended_use"]}

## Data and scores
{_hospitals(facts)}
{promised}
## Privacy
{_privacy(facts)}

## Limits
{limits}
"""


def _hospitals(facts: dict[str, Any]) -> str:
    lacks = [
        f"\n{site} has not: {', '.join(absent)}. {_unknown(facts, site)}\n" for site, absent in facts["absent"].items()
    ]
    if not facts["data"]:
        return "\n".join(["Not recorded: the run's summary was not beside the model when it was exported.", *lacks])
    metric = facts["metric"]
    lines = [
        f"| hospital | training cases | validation | test | {metric} | 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    for site, cases in facts["data"].items():
        counts = [_told((cases or {}).get(part)) for part in ("train", "validation", "test")]
        tested = facts["scores"].get(site) or {}
        low_high = tested.get("interval")
        between = f"{low_high[0]:.3f} to {low_high[1]:.3f}" if low_high else "–"
        score = f"{tested['score']:.4f}" if tested.get("score") is not None else "not told"
        where = f"{site} (did not train)" if site in facts["unseen"] else site
        lines.append(f"| {where} | {' | '.join(counts)} | {score} | {between} |")
    whole = [f"{name} {facts[key]:.4f}" for name, key in TOGETHER.items() if facts[key] is not None]
    together = f"\nOver the hospitals that tell theirs: {', '.join(whole)}.\n" if whole else ""
    return "\n".join([*lines, *lacks, together, INTERVALS])


def _unknown(facts: dict[str, Any], site: str) -> str:
    """Return what a hospital's score does not cover, and what its own model knows of that."""
    own = str(facts["model"].get("file", "")).startswith(f"{paths.SITES}/{site}/")
    learned = ""
    if undrawn := [name for name in facts["absent"][site] if name in facts["labels"]]:
        whose = "This model is that hospital's own" if own else "Its personal model is in this super model"
        learned = (
            f" {whose}: it never learned {', '.join(undrawn)} there, and knows of it what other hospitals' weights "
            "brought, untested."
        )
    agreed = site in facts["personal"]
    return f"Its score does not cover structures and classes among these.{learned * (own or agreed)}"


def _told(count: int | None) -> str:
    return "not told" if count is None else str(count)


def _privacy(facts: dict[str, Any]) -> str:
    promise, sealing = facts["privacy"], facts["sealing"]
    told = "The plan promises no differential privacy: treat the model as something that may tell of training cases."
    if promise:
        told = (
            f"Differential privacy for each {promise['unit']}: the plan promises ε = {promise['epsilon']:g} at "
            f"δ = {promise['delta']:g} for this study. A hospital may have demanded a smaller ε; its ledger says what "
            "was spent."
        )
    sealed = " Uploads were sealed: the server read sums over hospitals alone." if sealing else ""
    return told + sealed
