"""Write a job's metrics and model in NVFlare's format, so that `nvflare job download --format json` lists them.

NVFlare's format consists of the files `metrics_summary.json` and `round_metrics.jsonl`, which NVFlare's recipes also
use. In NVFlare's format, the first round has the number 0. A score in a round belongs to the model that a site receives
in this round. The round number of a score is the number of rounds for which the scored model was trained.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medsilo.core.files import make_folder, write_json, write_text
from medsilo.runs import paths
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary
from medsilo.runs.score import Score

FOLDER, SUMMARY_FILE, ROUNDS_FILE = "metrics", "metrics_summary.json", "round_metrics.jsonl"
MANIFEST = "artifact_manifest.json"
VERSION = "1"
SOURCE = "medsilo"
AGGREGATION = {"method": "mean_over_sites", "metric_policy": "sites_that_report_the_metric"}
NOTES = (
    "Aggregated metrics are plain means over the sites that report the metric.",
    "A metric ending in _low or _high is an end of the range of a score that sites rounded.",
    "Test scores are in summary.json of the study.",
)
Scores = Mapping[str, Score]


def write_artifacts(run: Path, job: Path) -> None:
    if not (run / paths.SUMMARY).exists():
        return
    summary = read_summary(run)
    if lines := _lines(summary, read_rounds(run, growing=True)):
        folder = job / FOLDER
        make_folder(folder)
        write_text(folder / ROUNDS_FILE, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        write_json(folder / SUMMARY_FILE, _summary(summary, lines))
    published = f"medsilo/{run.name}/{paths.GLOBAL}"
    for model in (f"{published}/{paths.BEST}", f"{published}/{paths.LAST}"):
        if (job / model).exists():
            write_json(job / MANIFEST, {"schema_version": VERSION, "artifacts": {"global_model": model}})
            break


def _lines(summary: Summary, rounds: list[Round]) -> list[dict[str, Any]]:
    """Return the lines of round_metrics.jsonl: one for each round, and one for the model after the last round."""
    lines = [metrics_of_round(summary.metric, line) for line in rounds]
    after = metrics_after(summary)
    return lines if after is None else [*lines, after]


def metrics_after(summary: Summary) -> dict[str, Any] | None:
    """Return the line about the model after the last round, or None if no site discloses this model's score."""
    after = summary.rounds.done
    scores = {site: summary.validated_at(site, after) for site in summary.sites}
    known = any(score.known for score in scores.values())
    return _record(after, summary.metric, scores, {}, {}) if known else None


def metrics_of_round(metric: str, line: Round) -> dict[str, Any]:
    """Return the line of round_metrics.jsonl about a round."""
    scores = {site: own.score for site, own in line.sites.items()}
    losses = {
        site: {"train_loss": own.train_loss, "validation_loss": own.validation_loss} for site, own in line.sites.items()
    }
    shares = {site: own.share for site, own in line.sites.items() if own.share}
    return _record(line.round - 1, metric, scores, losses, shares)


def tracked_numbers(line: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers that a tracker shows for a line of round_metrics.jsonl: for each site, a mapping from tags to
    numbers.

    NVFlare's receivers keep one run for each site and no run for the whole study, so each site's run also contains the
    means over sites.
    """
    means = {f"mean/{one['name']}": one["value"] for one in line["aggregated_metrics"]}
    return {
        site["name"]: {f"site/{one['name']}": one["value"] for one in site["metrics"]} | means for site in line["sites"]
    }


def _record(
    rounds: int,
    metric: str,
    scores: Scores,
    losses: Mapping[str, Mapping[str, float | None]],
    shares: Mapping[str, float],
) -> dict[str, Any]:
    own = {site: {**_numbers(metric, score), **_known(losses.get(site, {}))} for site, score in scores.items()}
    named = dict.fromkeys(name for numbers in losses.values() for name in numbers)
    means = {name: _mean(told) for name in named if (told := [own[site][name] for site in own if name in own[site]])}
    means = {**_numbers(metric, mean_score(scores)), **means}
    return {
        "round": rounds,
        "aggregated_metrics": _listed(means),
        "sites": [
            {
                "name": site,
                "metrics": _listed(numbers),
                **({"weight": shares[site], "weight_key": "share"} if site in shares else {}),
            }
            for site, numbers in own.items()
        ],
        "aggregation": AGGREGATION,
        "skipped_metrics": [
            {"site": site, "name": metric, "reason": "rounded_by_site" if score.known else "not_reported"}
            for site, score in scores.items()
            if score.kind != "value"
        ],
    }


def mean_score(scores: Scores) -> Score:
    """Return the mean score over the sites that report a score. If a site rounds its score, the mean is a range."""
    known = [score for score in scores.values() if score.known]
    if not known:
        return Score.told(None)
    low, high = (
        _mean([end or 0.0 for end in ends]) for ends in zip(*((one.low, one.high) for one in known), strict=True)
    )
    return Score.mean(low, high, known)


def _numbers(metric: str, score: Score) -> dict[str, float]:
    """Return a score as numbers, each under the metric's name. A score that is a range has two values, and an
    undisclosed score has no value.
    """
    if score.kind == "range":
        return {f"{metric}_low": score.low or 0.0, f"{metric}_high": score.high or 0.0}
    return {} if score.value is None else {metric: score.value}


def _summary(summary: Summary, lines: list[dict[str, Any]]) -> dict[str, Any]:
    chosen = set(summary.selected.rounds.values()) if summary.selected.by == "mean" else set()
    best = {}
    if len(chosen) == 1 and (found := [line for line in lines if line["round"] in chosen]):
        best = {
            "best_round": found[0]["round"],
            "best_metrics": found[0]["aggregated_metrics"],
            "best_metric_source": SOURCE,
            "best_metric_detail_source": "validation",
        }
    return {
        "schema_version": VERSION,
        "status": "metrics_reported",
        "job_name": summary.study,
        "metric_source": SOURCE,
        "metric_split": "validation",
        "key_metric": {"name": summary.metric, "mode": "max", "mode_source": SOURCE},
        "final_round": lines[-1]["round"],
        "final_aggregated_metrics": lines[-1]["aggregated_metrics"],
        **best,
        "aggregation": AGGREGATION,
        "round_metrics_file": ROUNDS_FILE,
        "notes": [*NOTES],
    }


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}


def _listed(numbers: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "value": number} for name, number in numbers.items()]


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
