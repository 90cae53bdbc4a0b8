"""Say what the runs show, in sentences and small tables, and what they do not show. No drawing, no HTML.

Beside the first sentence stands whether models have learned: below guessing, hardly, not converged.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from typing import Any, Literal

from medsilo.runs.outliers import standing_out
from medsilo_lab.report.formats import moment_of, number, short, shown
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import RunResult, same, sample, spans

MOST_ABSENCE_NOTICES = 6
STANDS_OUT, ROUNDED = "Stands out", "Rounded scores"
COARSE = 0.01  # by which a mean may be off before the title says so
SYNTHETIC = (
    "The data are synthetic. The numbers show that the software works; they say nothing about patients, and the order "
    "of the methods may differ on real images."
)
CHOSEN = (
    "Validation scores choose the round that is tested, unless the plan takes the last. So they look better than "
    "scores of new data. Test data were used once per run."
)


@dataclass(frozen=True)
class Notice:
    """Something a reader must know before any number."""

    kind: Literal["failed", "missing", "caution", "synthetic"]
    word: str
    text: str


SYNTHETIC_NOTICE = Notice(
    "synthetic", "Synthetic data", "No patient's image was used; the scores say nothing about patients."
)


def finding(runs: Sequence[RunResult]) -> str:
    """Return the page's title: what a run reaches; several are not ranked, since no interval is known."""
    if len(runs) > 1:
        return f"{len(runs)} runs side by side, none ranked"
    (run,) = runs
    if run.failed:
        return f"{run.label} failed"
    if not run.summary.telling:
        return f"{run.label}: no site has a test score"
    return f"{run.label} reaches a mean test {run.summary.metric} {_mean_in_words(run)}"


def _mean_in_words(run: RunResult) -> str:
    """Return the mean test score; between which numbers it is where rounding could change what it says."""
    mean, off = run.summary.mean_test, statistics.fmean(run.step(site) / 2 for site in run.summary.telling)
    if mean is None or off < COARSE:
        return f"of {number(mean)}"
    return f"between {number(max(mean - off, 0.0))} and {number(min(mean + off, 1.0))}"


def answer(runs: Sequence[RunResult]) -> str:
    """Return what the title rests on."""
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
    """Return why several runs are not ranked; of methods with the same seeds also by how much their means differ."""
    if not repeats_seeds(runs):
        return "Each run has one seed, and another seed may change their order, so none is ranked."
    means = _means_by_seed(runs)
    base, *others = means
    told = ""
    for method in others:
        shared = [means[method][seed] - mean for seed, mean in means[base].items() if seed in means[method]]
        if len(shared) > 1:
            told += (
                f"{method} minus {base}: {statistics.fmean(shared):+.3f} mean test {runs[0].summary.metric} over "
                f"{len(shared)} seeds ({min(shared):+.3f} to {max(shared):+.3f} by seed). "
            )
    return f"{told}Seeds alone do not say how sure a difference is for other patients, so none is ranked."


def _means_by_seed(runs: Sequence[RunResult]) -> dict[str, dict[int | None, float]]:
    """Return the mean test scores of each method, by seed; none where runs of a method share a seed."""
    known = [
        (run.summary.title or run.label, run.summary.seed, mean)
        for run in runs
        if (mean := run.summary.mean_test) is not None
    ]
    found: dict[str, dict[int | None, float]] = {method: {} for method, *_ in known}
    for method, seed, mean in known:
        found[method][seed] = mean
    return found if sum(map(len, found.values())) == len(known) else {}


def repeats_seeds(runs: Sequence[RunResult]) -> bool:
    """Return whether a method has runs of several seeds here."""
    return any(len(own) > 1 for own in _means_by_seed(runs).values())


def notices(runs: Sequence[RunResult]) -> list[Notice]:
    """All that belongs on the first screen beside the answer, the gravest first."""
    failed = [(run.label, run.summary.reason or "no reason given") for run in runs if run.failed]
    found = [Notice("failed", "Failed", f"{label}: {reason}") for label, reason in failed]
    missing = [notice for run in runs for notice in _missing(run)]
    left = len(missing) - MOST_ABSENCE_NOTICES
    if left > 0:
        rest = f"{left} more such {'entry' if left == 1 else 'entries'} under Participation."
        missing = [*missing[:MOST_ABSENCE_NOTICES], Notice("missing", "Missing", rest)]
    found += missing
    for word, lines in TOLD.items():
        found += [Notice("caution", word, f"{run.label}: {line}") for run in runs for line in lines(run)]
    found += [Notice("caution", ROUNDED, f"{run.label}: {line}.") for run in runs for line in run.rounding]
    found += [Notice("caution", "Caution", text) for text in _cautions(runs)]
    if any(run.summary.synthetic for run in runs):
        found.append(SYNTHETIC_NOTICE)
    return found


def _secure_aggregation(run: RunResult) -> Iterator[str]:
    if secure := run.summary.details.secure_aggregation:
        yield f"{' '.join(secure.protects)} The keys rest on {secure.keys}."


def _untrained(run: RunResult) -> Iterator[str]:
    sites = [site for site, chosen in run.summary.selected.rounds.items() if chosen == 0]
    if sites and run.summary.rounds.done:
        yield (
            f"the model tested at {', '.join(sites)} is that of round 0, before any training; "
            "model_selection.keep=last takes the last round's."
        )


TOLD: dict[str, Callable[[RunResult], Iterable[str]]] = {  # by the word that stands before it
    "Untrained": _untrained,
    "Caution": lambda run: run.summary.details.warnings,
    "Secure aggregation": _secure_aggregation,
    STANDS_OUT: lambda run: chain.from_iterable(standing_out(run.rounds).values()),
}


def limits(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield what no reader may conclude from this page."""
    if any(run.summary.synthetic for run in runs):
        yield SYNTHETIC
    if not repeats_seeds(runs):
        yield (
            "Each run has a single seed. Another seed changes every score, by an unknown amount, and without repeated "
            "runs any difference between methods may be chance."
        )
    yield from limits_of_all(runs)


def limits_of_all(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield what stands last on every page, and where times of these runs don't compare."""
    yield CHOSEN
    if len({run.summary.engine for run in runs}) > 1:
        yield "The runs used different engines, so their times do not compare."


def _missing(run: RunResult) -> list[Notice]:
    found = []
    for site in run.sites:
        if missed := run.missed(site):
            reasons = dict.fromkeys(missed.values())
            which = f"round{'s' if len(missed) > 1 else ''} {spans(missed)} of {run.summary.rounds.planned}"
            word = "Refused" if all(why.startswith("refused: ") for why in reasons) else "Missing"
            found.append(Notice("missing", word, f"{run.label}: {site} in {which} – {'; '.join(reasons)}"))
    return found


def _cautions(runs: Sequence[RunResult]) -> Iterator[str]:
    for run in runs:
        planned, done = run.summary.rounds.planned, run.summary.rounds.done
        if not run.failed and done < planned:
            yield f"{run.label} finished with {done} of {planned} planned rounds."
        if len({tuple(sorted(machine.items())) for site in run.sites if (machine := run.site(site).machine)}) > 1:
            yield f"{run.label}: its sites ran different versions or processors, so its last digits are their own."
        lacks = {site: tuple(run.site(site).absent) for site in run.sites}
        if len(set(lacks.values())) > 1:
            told = ", ".join(f"{site} not {' and '.join(names)}" for site, names in lacks.items() if names)
            yield (
                f"{run.label}: its sites do not have the same ({told}). Scores of sites that drew different "
                "structures are of different things: compare a structure. Their mean is one over structures."
            )
        *first, last = [site for site in run.sites if run.score(site) is None] or [""]
        if not run.failed and last:
            names = f"{', '.join(first)} and {last}" if first else last
            yield f"{run.label} has no test score for {names}; its mean leaves them out."
    if len({_packages(run) for run in runs}) > 1:
        yield "The runs were made with different packages, or versions of them (see Provenance)."


def _packages(run: RunResult) -> str:
    named = run.summary.packages.items()
    return ", ".join(f"{name} {shown(package.version)} ({short(package.hash)})" for name, package in named)


def provenance(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Facts shared by all runs as a list, those that differ as a table."""
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
        "Packages": _packages,
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


GUESSES = {"dice": 0.0, "concordance": 0.5}  # an empty mask where there is something to find, and a coin
BELOW, LITTLE = 0.02, 0.1  # of the way from guessing to perfect
LITTLE_OVERLAP = 0.2  # of masks, which overlap by chance
ENOUGH = 6  # values of a curve, of which its last half tells a rise from noise
STEEP = 0.02  # rise over that half


def guessing(run: RunResult, site: str) -> float | None:
    """Return the score of the most frequent class, an empty mask, a coin or the mean; None where it isn't known."""
    told, metric = run.site(site).classes or {}, run.summary.metric
    if metric != "accuracy":
        return GUESSES.get(metric, run.means.get(site))
    counts = told.get("test") or told.get("train")
    return max(counts) / sum(counts) if counts and sum(counts) else None


def _better(run: RunResult) -> float:
    """Return the share of the way from guessing to perfect that the mean test score is at, at most where it is
    rounded; 1 where nobody knows."""
    told = [(run.score(site), guessing(run, site), run.step(site) / 2) for site in run.sites]
    known = [(score + off, base) for score, base, off in told if score is not None and base is not None]
    return way(*map(statistics.fmean, zip(*known, strict=True))) if known else 1.0


def way(score: float, base: float) -> float:
    """Return the share of the way from guessing to perfect that a score is at; 1 where guessing is perfect."""
    return (score - base) / (1 - base) if base < 1 else 1.0


def is_little(share: float, metric: str) -> bool:
    """Return whether a score at this share of the way is no more than guessing reaches by chance."""
    return share < (LITTLE_OVERLAP if metric == "dice" else LITTLE)


def is_still_rising(run: RunResult) -> bool:
    """Return whether validation rises over the last half of the rounds.

    Its values, or the means of six stretches of many, are held against each other in pairs: of five none may fall, of
    six two of the fifteen pairs. Where a curve only scatters, that happens in less than 5 % of runs (Mann 1945).
    """
    curve = [value for value in run.mean_curve if value is not None]
    if len(curve) < ENOUGH:
        return False
    half = curve[-max(5, len(curve) // 2) :]
    places = min(len(half), 6)
    cuts = [len(half) * place // places for place in range(places + 1)]
    means = [statistics.fmean(half[start:end]) for start, end in pairwise(cuts)]
    falls = sum(later <= earlier for earlier, later in combinations(means, 2))
    coarse = max((run.step(site, "validation") for site in run.sites), default=0.0)
    return falls <= (2 if places == 6 else 0) and means[-1] - means[0] >= max(STEEP, coarse)


def _hardly(run: RunResult) -> bool:
    share = _better(run)
    return share >= -BELOW and is_little(share, run.summary.metric)


UNCONVERGED, FURTHER = "has not converged", "'medsilo run RUN --more 20' trains a run further."
SAID: dict[str, tuple[str, Callable[[RunResult], bool]]] = {
    "is below guessing": ("Below guessing", lambda run: _better(run) < -BELOW),
    "has not learned": ("Hardly better than guessing", _hardly),
    UNCONVERGED: ("Not converged after the last round", is_still_rising),
}


def learned(subjects: Sequence[Subject]) -> str:
    """Return what to know of these methods' learning before their scores, as sentences after a space; of several runs
    of a method what holds for most."""
    words = []
    for one, (several, holds) in SAID.items():
        found = {subject.label: [holds(run) for run in subject.runs if not run.failed] for subject in subjects}
        named = [label for label, own in found.items() if own and statistics.fmean(own) > 0.5]
        if named:
            words.append(f" The model {one}." if len(subjects) == 1 else f" {several}: {', '.join(named)}.")
            words.append(f" {FURTHER}" if one == UNCONVERGED else "")
    return "".join(words)
