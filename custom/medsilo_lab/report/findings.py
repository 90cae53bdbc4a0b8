"""Describe the results and the limitations of runs in sentences and small tables. This module makes no drawings and no
HTML.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from medsilo_lab.report.formats import moment_of, short, shown
from medsilo_lab.report.read import RunResult, same, sample
from medsilo_lab.report.run_warnings import packages_of
from medsilo_lab.study.words import points

SYNTHETIC = (
    "The data are synthetic. The numbers show that the software works; they say nothing about patients, and the order "
    "of the methods may differ on real images."
)
CHOSEN = (
    "Validation scores choose the round that is tested, unless the plan takes the last. So they look better than "
    "scores of new data. Test data were used once per run."
)


def finding(runs: Sequence[RunResult]) -> str:
    """Return the title of a page about runs. The title does not rank several runs, because the differences between the
    runs have no confidence interval.
    """
    if len(runs) > 1:
        return f"{len(runs)} runs side by side, none ranked"
    (run,) = runs
    if run.failed:
        return f"{run.label} failed"
    if not run.summary.telling:
        return f"{run.label}: no site has a test score"
    return f"{run.label} reaches a mean test {run.summary.metric} of {run.summary.mean_score}"


def answer(runs: Sequence[RunResult]) -> str:
    """Describe the sample and the seed of a single run, or explain why several runs are not ranked."""
    if len(runs) > 1:
        ranks = "medsilo.compare" if all(run.summary.task == "script" for run in runs) else "'medsilo compare'"
        return f"{_why_unranked(runs)} {ranks} ranks methods."
    (run,) = runs
    telling = run.summary.telling
    if run.failed or not telling:
        return "No site has a test score."
    over = f"over {len(telling)} sites" if len(telling) > 1 else "at the one site"
    seed = "one seed" if run.summary.seed is None else f"one seed ({run.summary.seed})"
    return f"The mean {over}, {sample(runs)}, with {seed}. Another seed gives other scores."


def _why_unranked(runs: Sequence[RunResult]) -> str:
    if not repeats_seeds(runs):
        return "Each run has one seed, and another seed may change their order, so none is ranked."
    means = _means_by_seed(runs)
    base, *others = means
    told = ""
    for method in others:
        shared = [means[method][seed] - mean for seed, mean in means[base].items() if seed in means[method]]
        if len(shared) > 1:
            told += (
                f"{method} minus {base}: {points(statistics.fmean(shared))} points of mean test "
                f"{runs[0].summary.metric} over {len(shared)} seeds ({points(min(shared))} to {points(max(shared))} by "
                "seed). "
            )
    return f"{told}Seeds alone do not say how sure a difference is for other patients, so none is ranked."


def _means_by_seed(runs: Sequence[RunResult]) -> dict[str, dict[int | None, float]]:
    """Return the exact mean test score of each method and seed. If two runs of a method have the same seed, return an
    empty mapping.
    """
    known = [
        (run.summary.title or run.label, run.summary.seed, mean)
        for run in runs
        if (mean := run.summary.mean_score.value) is not None
    ]
    found: dict[str, dict[int | None, float]] = {method: {} for method, *_ in known}
    for method, seed, mean in known:
        found[method][seed] = mean
    return found if sum(map(len, found.values())) == len(known) else {}


def repeats_seeds(runs: Sequence[RunResult]) -> bool:
    return any(len(own) > 1 for own in _means_by_seed(runs).values())


def limits(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield the limitations of a page. A limitation is a conclusion that the results on the page do not support."""
    if any(run.summary.synthetic for run in runs):
        yield SYNTHETIC
    if not repeats_seeds(runs):
        yield (
            "Each run has a single seed. Another seed changes every score, by an unknown amount, and without repeated "
            "runs any difference between methods may be chance."
        )
    yield from limits_of_all(runs)


def limits_of_all(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield the limitations that every page has. If the runs used different engines, a further limitation says that
    durations of runs are not comparable.
    """
    yield CHOSEN
    if len({run.summary.engine for run in runs}) > 1:
        yield "The runs used different engines, so their times do not compare."


def provenance(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return facts about the runs: a list of the facts that all runs share, and a table of the facts that differ."""
    facts: dict[str, Callable[[RunResult], str]] = {
        "Status": lambda run: run.summary.status,
        "Task": lambda run: shown(run.summary.task),
        "Protocol": lambda run: shown(run.summary.protocol),
        "Seed": lambda run: shown(run.summary.seed),
        "Network": lambda run: shown(run.summary.network),
        "Parameters": lambda run: shown(run.summary.parameters),
        "Rounds": lambda run: f"{run.summary.rounds.done} of {run.summary.rounds.planned}",
        "Model chosen": lambda run: {"mean": "one round for all sites", "site": "each site its own round"}.get(
            run.summary.selected.by or "", shown(run.summary.selected.by)
        ),
        "Engine": lambda run: shown(run.summary.engine),
        "Packages": packages_of,
        "Study": lambda run: shown(run.summary.study),
        "Started (UTC)": lambda run: moment_of(run.summary.started),
        "Ended (UTC)": lambda run: moment_of(run.summary.ended),
        "Plan hash": lambda run: short(run.summary.plan_hash),
        "Folder": lambda run: run.folder,
    }
    shared = {name: same(runs, view) for name, view in facts.items()}
    differing = [name for name, value in shared.items() if value is None]
    rows = [(run.label, [facts[name](run) for name in differing]) for run in runs]
    return {
        "shared": {name: value for name, value in shared.items() if value is not None},
        "differing": differing,
        "rows": rows,
        "runs": runs,
    }
