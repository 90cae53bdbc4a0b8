"""Say beside a page's first sentence whether the models have learned: below guessing, hardly learned, still rising."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, pairwise

from medsilo.report.panels import Subject
from medsilo.report.read import RunResult, same

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


def guessing_at(sites: Sequence[str], runs: Sequence[RunResult]) -> list[float | None]:
    """Return what guessing reaches at each site, as charts show it; None where runs don't agree."""
    classified = all(run.summary.metric == "accuracy" for run in runs)
    return [same(runs, partial(guessing, site=site)) if classified else None for site in sites]


def _better(run: RunResult) -> float:
    """Return the share of the way from guessing to perfect that the mean test score is at; 1 where nobody knows."""
    told = [(run.score(site), guessing(run, site)) for site in run.sites]
    known = [(score, base) for score, base in told if score is not None and base is not None]
    if not known:
        return 1.0
    score, base = (statistics.fmean(column) for column in zip(*known, strict=True))
    return (score - base) / (1 - base) if base < 1 else 1.0


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
    return falls <= (2 if places == 6 else 0) and means[-1] - means[0] >= STEEP


def _hardly(run: RunResult) -> bool:
    return -BELOW <= _better(run) < (LITTLE_OVERLAP if run.summary.metric == "dice" else LITTLE)


SAID: dict[str, tuple[str, Callable[[RunResult], bool]]] = {
    "is below guessing": ("Below guessing", lambda run: _better(run) < -BELOW),
    "has hardly learned": ("Hardly better than guessing", _hardly),
    "is still rising": ("Still rising after the last round", is_still_rising),
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
    return "".join(words)
