"""Checks in words at the top of a page: what a reader with experience would look at before any score.

Each check rests on what the runs' files say already. One that could not be made, because no run tells what it needs, is
left out.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medsilo.report.findings import is_central, is_local
from medsilo.report.learned import guessing, little
from medsilo.report.panels import Subject
from medsilo.report.read import RunResult
from medsilo.report.table import number

ORDERS_WELL, DECIDES_BADLY = 0.9, 0.15  # an AUROC, and how far the balanced accuracy may stay below it
FELL = 0.1  # from its best round to its last
NO_ROOM = 0.02  # between training alone and all data in one place
ODD_SEED = 0.15  # from the median of all


@dataclass(frozen=True)
class Check:
    """A question, all that speaks against a plain yes, and what to do about it."""

    question: str
    found: tuple[str, ...] = ()
    advice: str = ""


Looked = list[str] | None  # what a check found at one subject; None where nothing can be said


def checks(subjects: Sequence[Subject]) -> list[Check]:
    """Return the checks that could be made of these methods, each with its runs."""
    made = [
        _each(
            "Does every method do clearly better than guessing at every site?",
            subjects,
            _guesses,
            "Such a model has learned nothing there: look at the learning rate, the rounds and the labels.",
        ),
        _each(
            "Are decisions as good as the order of the cases allows (AUROC)?",
            subjects,
            _decides_badly,
            "Running statistics or the threshold don't fit there; try network.norm=group.",
        ),
        _each(
            "Does training stay near its best round?",
            subjects,
            _fell,
            "A smaller learning rate or group norm steadies it.",
        ),
        _each("Do the seeds of a method agree?", subjects, _odd_seeds, "Look at that seed's run before its mean."),
        _each(
            "Is every method tested at its best round on validation data?",
            subjects,
            _late,
            "Another round would have been chosen; some methods and tracking.select=last always take the last.",
        ),
        _room(subjects),
    ]
    return [check for check in made if check]


def _each(question: str, subjects: Sequence[Subject], look: Callable[[Subject], Looked], advice: str) -> Check | None:
    """Put one question to every subject."""
    looked = [(subject.label, look(subject)) for subject in subjects if any(not run.failed for run in subject.runs)]
    known = [(label, found) for label, found in looked if found is not None]
    lines = tuple(f"{label} {'; '.join(found)}" for label, found in known if found)
    return Check(question, lines, advice) if known else None


def _guesses(subject: Subject) -> Looked:
    """Return at which sites the score is that of guessing."""
    sites: dict[str, list[bool]] = {}
    for run in subject.runs:
        for site in run.sites:
            score, base = run.score(site), guessing(run, site)
            if score is not None and base is not None:
                sites.setdefault(site, []).append(score < base + little(run) * (1 - base))
    if not sites:
        return None
    found = [site for site, guesses in sites.items() if statistics.mean(guesses) > 0.5]
    return [f"at {', '.join(found)}"] if found else []


def _decides_badly(subject: Subject) -> Looked:
    """Return where cases are well ordered and badly decided, as under statistics that don't fit."""
    found, known = [], False
    for site in dict.fromkeys(site for run in subject.runs for site in run.sites):
        told = [run.site(site).figures for run in subject.runs]
        pairs = [(own.get("auroc"), own.get("balanced_accuracy")) for own in told]
        both = [(order, decided) for order, decided in pairs if order is not None and decided is not None]
        if not both:
            continue
        known = True
        order, decided = (statistics.mean(column) for column in zip(*both, strict=True))
        if order >= ORDERS_WELL and decided < order - DECIDES_BADLY:
            found.append(f"at {site} (AUROC {number(order)}, balanced accuracy {number(decided)})")
    return found if known else None


def _fell(subject: Subject) -> Looked:
    """Return how far the mean validation score fell after its best round."""
    curves = [[value for value in run.mean_curve if value is not None] for run in subject.runs]
    falls = [max(curve) - curve[-1] for curve in curves if len(curve) > 1]
    if not falls:
        return None
    if statistics.median(falls) < FELL:
        return []
    return [f"(ends {number(statistics.median(falls))} below it on validation data)"]


def _odd_seeds(subject: Subject) -> Looked:
    """Return which seeds lie far from the median of all."""
    means: dict[int | None, list[float]] = {run.summary.seed: [] for run in subject.runs}
    for run in subject.runs:
        if run.summary.mean_test is not None:
            means[run.summary.seed].append(run.summary.mean_test)
    by_seed = {seed: statistics.mean(own) for seed, own in means.items() if own}
    if len(by_seed) < 3:
        return None
    middle = statistics.median(by_seed.values())
    found = [
        f"(seed {seed} has {number(mean)}, the middle one {number(middle)})"
        for seed, mean in by_seed.items()
        if abs(mean - middle) > ODD_SEED
    ]
    return found


def _late(subject: Subject) -> Looked:
    """Return in how many runs the last round was tested though an earlier one was better; None where nobody tells."""
    known = [late for run in subject.runs if not run.failed and (late := _by_course(run)) is not None]
    if not known:
        return None
    return [f"(after the last round, in {sum(known)} of {len(known)} runs)"] if any(known) else []


def _by_course(run: RunResult) -> bool | None:
    """Return whether the last round was tested though an earlier one had a better validation score."""
    rounds, curve = set(run.summary.selected.rounds.values()) - {None}, run.mean_curve
    if not rounds or not curve or curve[-1] is None:
        return None
    return rounds == {run.summary.rounds.done} and curve[-1] < max(value for value in curve if value is not None)


def _room(subjects: Sequence[Subject]) -> Check | None:
    """Return whether pooled data gain anything over training alone, so that a federation could."""
    alone = next((_mean_test(one) for one in subjects if _only(is_local, one)), None)
    pooled = next((_mean_test(one) for one in subjects if _only(is_central, one)), None)
    if alone is None or pooled is None:
        return None
    little = (f"pooled data {number(pooled)}, training alone {number(alone)}",) if pooled - alone < NO_ROOM else ()
    return Check("Is there room for a gain from joining?", little, "No federation can gain much here.")


def _only(kind: Callable[[RunResult], bool], subject: Subject) -> bool:
    """Return whether a subject has runs, and all are of a kind."""
    return bool(subject.runs) and all(map(kind, subject.runs))


def _mean_test(subject: Subject) -> float | None:
    known = [run.summary.mean_test for run in subject.runs if run.summary.mean_test is not None]
    return statistics.mean(known) if known else None
