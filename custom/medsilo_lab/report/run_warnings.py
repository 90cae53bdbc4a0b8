"""The warnings about runs and comparisons, for the terminal, pages, JSON and Python."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise
from pathlib import Path

from medsilo.registry import TASKS
from medsilo.runs.outliers import standing_out
from medsilo.runs.score import UNDEFINED, number_text
from medsilo.site.settings import MIN_PATIENTS_PER_METRIC
from medsilo.tasks.scored_together import IN_WORDS, usual_score
from medsilo_lab.report.formats import short, shown
from medsilo_lab.report.read import RunResult, read, spans
from medsilo_lab.study.verdict_file import Notice, Verdict

Rows = Mapping[str, Sequence[RunResult]]
MOST_ABSENCES, MOST_NAMED = 6, 4
SYNTHETIC_NOTICE = Notice(
    kind="synthetic",
    word="Synthetic data",
    text="No patient's image was used; the scores say nothing about patients.",
)


def warnings(rows: Rows, failures: Sequence[str] = ()) -> list[Notice]:
    """Return all warnings about the given runs. The most serious warning comes first.

    Args:
        failures: lines of text about the failed runs of a comparison
    """
    runs = [run for row in rows.values() for run in row]
    failed = [*failures, *(f"{run.label}: {run.summary.reason or 'no reason given'}" for run in runs if run.failed)]
    found = [Notice(kind="failed", word="Failed", text=text) for text in failed]
    found += _absences(runs)
    found += learning(rows)
    for word, lines in TOLD.items():
        found += [Notice(kind="caution", word=word, text=text) for text in _named(rows, lines)]
    if len({packages_of(run) for run in runs}) > 1:
        text = "The runs were made with different packages, or versions of them (see Provenance)."
        found.append(Notice(kind="caution", word="Caution", text=text))
    return found + [SYNTHETIC_NOTICE] * any(run.summary.synthetic for run in runs)


def runs_of(folder: Path, verdict: Verdict, whole: bool = False) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {row.title: [] for row in verdict.rows}
    for one in verdict.runs:
        turn = f", fold {one.fold}" if one.fold else ""
        run = read(folder / one.run, whole)
        found[one.row].append(replace(run, label=f"{one.row}, seed {one.seed}{turn}"))
    return found


def of_run(run: RunResult) -> list[Notice]:
    return warnings({run.label: [run]})


def learning(rows: Rows, site: str | None = None) -> list[Notice]:
    """Return the warnings about untrained models, and about models that did not learn or did not converge.

    A configuration gets the warning "did not learn" or "did not converge" only if this is true of more than half of its
    runs.

    Args:
        site: the only hospital for which there are warnings about untrained models
    """
    found = [Notice(kind="caution", word="Untrained", text=text) for text in _untrained(rows, site)]
    for word, holds in LEARNED.items():
        said: dict[str, list[str]] = {}
        for name, row in rows.items():
            judged = [holds(run) for run in row if not run.failed]
            texts = [text for text in judged if text]
            if len(texts) > len(judged) / 2:
                said.setdefault(texts[0], []).append(name)
        found += [Notice(kind="caution", word=word, text=f"{', '.join(names)}: {text}") for text, names in said.items()]
    return found


def _untrained(rows: Rows, site: str | None) -> Iterator[str]:
    """For each configuration in which a site tested an untrained model, yield a line of text. The line says in how many
    runs of the configuration an untrained model was tested.
    """
    for name, row in rows.items():
        sites = {
            run.label: [
                one for one, chosen in run.summary.selected.rounds.items() if chosen == 0 and site in (None, one)
            ]
            for run in row
            if run.summary.rounds.done
        }
        if raw := [label for label, there in sites.items() if there]:
            where = ", ".join(dict.fromkeys(chain.from_iterable(sites.values())))
            often = f", in {len(raw)} of {len(row)} runs" if len(row) > 1 else ""
            yield (
                f"{name}: the model tested at {where} is that of round 0, before any training{often}; "
                "model_selection.keep=last takes the last round's"
            )


def _named(rows: Rows, lines: Callable[[RunResult], Iterable[str]]) -> Iterator[str]:
    """Yield each distinct line of text once. Each line begins with the names of the configurations or runs to which the
    line applies.
    """
    found: dict[str, list[RunResult]] = {}
    for run in chain.from_iterable(rows.values()):
        for line in lines(run):
            found.setdefault(line, []).append(run)
    for line, said in found.items():
        names = []
        for name, row in rows.items():
            here = [run.label for run in row if any(run is one for one in said)]
            names += [name] if here and len(here) == len(row) else here
        left = len(names) - MOST_NAMED
        more = f" and {left} more" if left > 0 else ""
        yield f"{', '.join(names[:MOST_NAMED])}{more}: {line}"


def _absences(runs: Sequence[RunResult]) -> list[Notice]:
    found = []
    for run in runs:
        for site in run.sites:
            if missed := run.missed(site):
                reasons = dict.fromkeys(missed.values())
                which = f"round{'s' if len(missed) > 1 else ''} {spans(missed)} of {run.summary.rounds.planned}"
                word = "Refused" if all(why.startswith("refused: ") for why in reasons) else "Missing"
                text = f"{run.label}: {site} in {which} – {'; '.join(reasons)}"
                found.append(Notice(kind="missing", word=word, text=text))
    left = len(found) - MOST_ABSENCES
    if left > 0:
        rest = f"{left} more such {'entry' if left == 1 else 'entries'} under Participation."
        found = [*found[:MOST_ABSENCES], Notice(kind="missing", word="Missing", text=rest)]
    return found


def _cautions(run: RunResult) -> Iterator[str]:
    yield from run.summary.details.warnings
    planned, done = run.summary.rounds.planned, run.summary.rounds.done
    if not run.failed and done < planned:
        yield f"finished with {done} of {planned} planned rounds."
    if len({tuple(sorted(machine.items())) for site in run.sites if (machine := run.site(site).machine)}) > 1:
        yield "its sites ran different versions or processors, so its last digits are their own."
    lacks = {site: tuple(run.site(site).absent) for site in run.sites}
    if len(set(lacks.values())) > 1:
        told = ", ".join(f"{site} not {' and '.join(names)}" for site, names in lacks.items() if names)
        yield (
            f"its sites do not have the same ({told}). Scores of sites that drew different "
            "structures are of different things: compare a structure. Their mean is one over structures."
        )
    undefined = [site for site in run.sites if run.score_at(site).kind == UNDEFINED]
    *first, last = [site for site in run.sites if run.score(site) is None and site not in undefined] or [""]
    if not run.failed and last:
        names = f"{', '.join(first)} and {last}" if first else last
        yield f"no test score for {names}; its mean leaves them out."
    for why in dict.fromkeys(_why_undefined(run, site) for site in undefined):
        named = ", ".join(site for site in undefined if _why_undefined(run, site) == why)
        metric = IN_WORDS.get(run.summary.metric, run.summary.metric)
        yield f"{metric} undefined at {named}{why}; means and comparisons leave it out."


def _why_undefined(run: RunResult, site: str) -> str:
    """Return the reason why a site's score is undefined, if the reason is that all its test cases have one class.

    A site with an undefined score does not round its counts, so a count of 0 means that the class has no case.
    """
    counts = (run.site(site).classes or {}).get("test") or ()
    return ": one class" if sum(map(bool, counts)) == 1 else ""


def _secure_aggregation(run: RunResult) -> Iterator[str]:
    if secure := run.summary.details.secure_aggregation:
        yield f"{' '.join(secure.protects)} The keys rest on {secure.keys}."


def packages_of(run: RunResult) -> str:
    """Describe each package whose code ran by its name, version and hash."""
    named = run.summary.packages.items()
    return ", ".join(f"{name} {shown(package.version)} ({short(package.hash)})" for name, package in named)


def _weights(run: RunResult) -> Iterator[str]:
    yield from (f"{site}: {weighed.warning}" for site, weighed in run.weighed.items() if weighed.warning)


# first words of a warning → function that yields the rest of the warning
TOLD: dict[str, Callable[[RunResult], Iterable[str]]] = {
    "Caution": _cautions,
    "Rounded weight": _weights,
    "Secure aggregation": _secure_aggregation,
    "Stands out": lambda run: chain.from_iterable(standing_out(run.rounds).values()),
    "Rounded scores": lambda run: run.rounding,
}


# ---------------------------------------------------------------------------------------------------- learning
GUESSES = {"dice": 0.0, "concordance": 0.5, "auroc": 0.5}  # metric → score of an empty mask or a random order
BELOW, LITTLE = 0.02, 0.1  # limits for the score of a run, on a scale on which 0 is guessing and 1 is a perfect score
LITTLE_OVERLAP = 0.2  # replaces LITTLE for masks, because masks may overlap by chance
ENOUGH = 6  # a validation curve with less than this number of values is not tested for a rise
STEEP = 0.02  # if the last half of a validation curve rises by more than this number, the model has not converged


def guessing(run: RunResult, site: str) -> float | None:
    """Return the score of guessing, or None if this score is unknown. Depending on the task, guessing means to predict
    the most frequent class, an empty mask, a random order or the mean.
    """
    told, metric = run.site(site).classes or {}, run.summary.metric
    if metric == "balanced_accuracy":
        return 1 / len(run.summary.labels)
    if metric != "accuracy":
        return GUESSES.get(metric, run.means.get(site))
    counts = told.get("test") or told.get("train")
    if not counts or not sum(counts):
        return None
    # a hospital that rounds its scores sends the count 0 for a class with few patients
    hidden = (MIN_PATIENTS_PER_METRIC - 1) * counts.count(0) if run.step(site) else 0
    return max(counts) / (sum(counts) + hidden)


def _better(run: RunResult) -> float:
    """Return the mean test score on a scale on which 0 is the score of guessing and 1 is a perfect score. A rounded
    score counts as the upper end of its range. If no score is known, return 1.
    """
    held = _held(run)
    return way(*held) if held else 1.0


def _held(run: RunResult) -> tuple[float, float] | None:
    """Return the mean test score and the mean score of guessing. A rounded score counts as the upper end of its
    range.
    """
    told = [(run.score_at(site).high, guessing(run, site)) for site in run.sites]
    known = [(score, base) for score, base in told if score is not None and base is not None]
    scores, bases = (statistics.fmean(own) for own in zip(*known, strict=True)) if known else (0.0, 0.0)
    return (scores, bases) if known else None


def way(score: float, base: float) -> float:
    """Convert a score to a scale on which 0 is the score of guessing and 1 is a perfect score. If the score of guessing
    is itself perfect, return 1.
    """
    return (score - base) / (1 - base) if base < 1 else 1.0


def is_little(share: float, metric: str) -> bool:
    """Return True if `share` is so low that the model may be no better than guessing. `share` is a score on a scale on
    which 0 is the score of guessing and 1 is a perfect score.
    """
    return share < (LITTLE_OVERLAP if metric == "dice" else LITTLE)


def is_still_rising(run: RunResult) -> bool:
    """Return True if the validation score rises over the last half of the rounds.

    To test for a rise, the curve is divided into at most six segments, and the means of all pairs of segments are
    compared. With five segments, no later segment may have a lower mean than an earlier segment. With six segments, the
    later segment may have the lower mean in at most two of fifteen pairs. If a curve does not rise and varies at
    random, the test finds a rise in less than 5 % of runs (Mann 1945).
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
    return not _is_below(run) and is_little(share, run.summary.metric)


def _is_below(run: RunResult) -> bool:
    """Return True if the mean score is lower than the score of guessing. To allow for chance, the mean score must be
    lower by more than BELOW, and by at least one test case per site.
    """
    held = _held(run)
    return held is not None and way(*held) < -BELOW and (held[1] - held[0]) * run.tested >= len(run.summary.telling)


def _below(run: RunResult) -> str:
    if not _is_below(run):
        return ""
    return f"the model is below guessing: its {run.summary.metric} is less than that of {_guess(run)}"


def _little(run: RunResult) -> str:
    if not _hardly(run):
        return ""
    told = f"its {run.summary.metric} is {'hardly' if _better(run) > 0 else 'no'} better than that of {_guess(run)}"
    if run.summary.metric == "accuracy" and (area := run.summary.pooled.get("auroc") or 0.0) >= RANKS:
        shown = number_text(area, run.summary.pooled_score.n)
        return f"{told}, which hides what the model has learned: its AUROC is {shown}{_remedy(run)}"
    return f"the model has not learned: {told}{_remedy(run)}"


def _rising(run: RunResult) -> str:
    told = "the model has not converged after the last round; 'medsilo run RUN --more 20' trains a run further"
    return told if is_still_rising(run) else ""


def _guess(run: RunResult) -> str:
    if run.summary.metric != "accuracy":
        return GUESS.get(run.summary.metric, "always saying the mean")
    bases = [base for site in run.sites if (base := guessing(run, site)) is not None]
    return f"always saying the most frequent class ({number_text(statistics.fmean(bases), run.summary.pooled_score.n)})"


def _remedy(run: RunResult) -> str:
    """Advise another score, if the task has the key `score` and the present score is the accuracy."""
    task = run.summary.task
    if run.summary.metric != "accuracy" or not task or task not in TASKS or "score" not in TASKS[task].model_fields:
        return ""
    score = usual_score(run.summary.labels)
    return f"; with task.score={score}, the {IN_WORDS[score]} selects the round"


GUESS = {
    "dice": "an empty mask",
    "concordance": "a coin",
    "auroc": "a coin",
    "balanced_accuracy": "always saying the same class",
}
RANKS = 0.6  # if the AUROC is below this number, the model does not separate the classes
# first words of a warning → function that returns the rest of the warning, or an empty text
LEARNED: dict[str, Callable[[RunResult], str]] = {
    "Below guessing": _below,
    "Not learned": _little,
    "Not converged": _rising,
}
