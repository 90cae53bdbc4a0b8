"""Draw the convergence of methods: validation scores against rounds and against transferred bytes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from matplotlib.ticker import MaxNLocator

from medsilo.core.errors import MedsiloError
from medsilo_server.record import Record
from results.analyses.analysis import AnalysisResult, Question
from results.analyses.figures import panels, style
from results.analyses.finished import FinishedRun


def curves(runs: Sequence[FinishedRun], asked: Question) -> AnalysisResult:
    """Return, for the end of each round, the sites' mean validation score, and the bytes that all sites had sent and
    received until then.
    """
    metrics = {run.summary.metric for run in runs}
    if len(metrics) > 1:
        raise MedsiloError(f"these runs measure {' and '.join(sorted(metrics))}; compare runs of one metric")
    found: list[dict[str, Any]] = []
    lines = []
    for run in runs:
        sites = run.summary.sites.values()
        scores = [_mean(column) for column in zip(*(site.validation for site in sites), strict=True)]
        rounds = [
            sum(site.bytes_up + site.bytes_down for site in line.sites.values()) for line in Record(run.folder).rounds()
        ]
        sent = [0, *accumulate(rounds)]
        found.append({"run": run.label, "score": scores, "bytes": sent})
        known = [score for score in scores if score is not None]
        lines.append(f"{run.label}: {max(known):.3f} at best, {known[-1]:.3f} at the end, {sent[-1] / 1e6:.3g} MB")
    figure, ((by_round, by_bytes),) = panels(1, 2, 4.2, 3.4)
    for place, one in enumerate(found):
        look = style(place)
        curve = {number: score for number, score in enumerate(one["score"]) if score is not None}
        heights = list(curve.values())
        by_round.plot(list(curve), heights, label=one["run"], markersize=4, **look)
        if one["bytes"][-1]:
            by_bytes.plot([one["bytes"][number] / 1e6 for number in curve], heights, markersize=4, **look)
        else:  # single-site and pooled training transfer no bytes, so their score is drawn as a horizontal line
            by_bytes.axhline(heights[-1], color=look["color"], linestyle=look["linestyle"])
    by_round.set(xlabel="rounds", ylabel=f"validation {metrics.pop()}, mean over sites")
    by_bytes.set(xlabel="MB sent and got by all sites")
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_round.legend(fontsize=8)
    return AnalysisResult({"curves": found}, {"convergence": figure}, lines)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
