"""A sheet for each hospital, one printed page that may be mailed to it: of a comparison whether joining pays there.

It shows the hospital's own numbers and those of all hospitals together, and no other hospital's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.text import counted, is_safe_name
from medsilo.report.findings import CHOSEN, STANDS_OUT, SYNTHETIC, Answer, Notice
from medsilo.report.formats import between, bytes_text, seconds_text
from medsilo.report.gains import LEAST, first_screen
from medsilo.report.learned import learned
from medsilo.report.panels import Subject
from medsilo.report.read import RunResult, read, spans
from medsilo.report.table import number, score_text
from medsilo.report.template import fill, save
from medsilo.runs import paths
from medsilo.runs.reading import read_verdict
from medsilo.runs.schema import HospitalGain, Level, Verdict
from medsilo.study.words import in_patients, points, verdict_in_words

Facts = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Leaving:
    """Words on what leaves each hospital: groups of tensors with their rounds and bytes, and further lines."""

    groups: Sequence[tuple[str, str, int]]  # name, rounds, bytes a round
    lines: Sequence[str]

    @property
    def words(self) -> list[str]:
        """Return it in lines."""
        alike: dict[tuple[str, int], list[str]] = {}
        for name, rounds, size in self.groups:
            alike.setdefault((name, size), []).append(rounds)
        groups = {f"{name}: {bytes_text(size)}": ", ".join(own) for (name, size), own in alike.items()}
        return [*(f"{one} in round{'s' * (not own.isdecimal())} {own}." for one, own in groups.items()), *self.lines]


def write_sheets(folder: Path, leaving: Callable[[Path], Leaving]) -> list[Path]:
    """Write a sheet for each hospital of a run or a comparison, and return where they are.

    leaving: what leaves in a run.
    """
    if (folder / paths.VERDICT).exists():
        verdict = read_verdict(folder)
        first = {one.row: folder / one.run for one in reversed(verdict.runs)}
        _check_names(verdict.gains)
        pages = {
            site: of_comparison(verdict, site, one, read(first[one.method]), leaving(first[one.method]))
            for site, one in verdict.gains.items()
        }
    else:
        run = read(folder)
        _check_names(run.sites)
        with reading(f"what run '{run.folder}' tells, in summary.json, rounds.jsonl or test.csv,"):
            took_part = [site for site in run.sites if run.site(site).contributed is not None]
            pages = {site: of_run(run, site, leaving(folder)) for site in took_part}
    return [save(page, folder / paths.HOSPITALS / f"{site}.html") for site, page in pages.items()]


def _check_names(sites: Sequence[str] | dict[str, HospitalGain]) -> None:
    if odd := [site for site in sites if not is_safe_name(site)]:
        raise MedsiloError(
            "a hospital's name there can't be a file's name; correct summary.json or verdict.json", odd[0]
        )


def _sheet(title: str, context: str, answer: Answer, facts: Facts, left: Sequence[str], **more: Any) -> str:
    shown = {"first": None, "notices": [], **more}
    return fill("sheet.html", title, context=context, answer=answer, checks=[], facts=dict(facts), left=left, **shown)


# ---------------------------------------------------------------------------------------------------- a comparison
def of_comparison(verdict: Verdict, site: str, one: HospitalGain, run: RunResult, leaving: Leaving) -> str:
    """The sheet as text. run: the first one of the method that is asked about."""
    return _sheet(
        f"Decision sheet for {site}",
        f"{verdict.task_title} · {counted(len(verdict.sites), 'hospital')} · {one.method}",
        Answer(answer(verdict.metric, site, one)),
        _facts(verdict, site, one, run),
        leaving.words,
        first=first_screen(verdict, [site]),
        limits=list(_limits(verdict, one)),
    )


def answer(metric: str, site: str, one: HospitalGain) -> str:
    """Return the verdict as a sentence."""
    (told, _, needed), gain = verdict_in_words(one).partition(": "), one.gain.mean
    told += f" ({needed})" * bool(needed)
    what = f"test {metric} is {points(abs(gain))[1:]} points {'higher' if gain > 0 else 'lower'}"
    what = in_patients(metric, gain) or what
    return f"{told[0].upper()}{told[1:]}: at {site}, {what} with {one.method} than with training alone."


def _facts(verdict: Verdict, site: str, one: HospitalGain, run: RunResult) -> Facts:
    known = [(row, found) for row in verdict.rows if (found := row.sites.get(site))]
    joined = next(found for row, found in known if row.title == one.method)
    alone = [found for row, found in known if row.method == "local"]
    # Where there are several, of other norms, it is the one that the gain is against.
    alone.sort(key=lambda found: abs(joined.mean - found.mean - one.gain.mean))
    yield f"Test {verdict.metric}, together", _level(joined)
    if alone:
        yield f"Test {verdict.metric}, alone", _level(alone[0])
    yield "Tested on", run.tested_in_words(site) + f", {counted(len(verdict.seeds), 'seed')}"
    yield from _work(run, site)


def _level(found: Level) -> str:
    return f"{number(found.mean)} ({between((found.low, found.high))})"


def _limits(verdict: Verdict, one: HospitalGain) -> Iterator[str]:
    if verdict.synthetic:
        yield SYNTHETIC
    yield f"The gain is of {counted(len(verdict.seeds), 'seed')}; its interval is for {verdict.holds_for}."
    if one.word in ("promising", "too few patients", "too few seeds"):
        yield "An uncertain gain does not mean that there is none."
    yield CHOSEN


# ---------------------------------------------------------------------------------------------------- a run
def of_run(run: RunResult, site: str, leaving: Leaving) -> str:
    """The sheet as text."""
    summary, told = run.summary, run.site(site)
    left, tested = leaving.words, run.tested_in_words(site)
    if told.decisions and told.decisions.threshold is not None:
        left.append(f"A threshold that follows from its validation cases: {told.decisions.threshold:g}.")
    if told.withheld:
        left.append(f"Kept by the hospital: {', '.join(told.withheld)}.")
    limits = [
        "This is one run with one seed. Another seed changes every score, by an unknown amount.",
        *([f"Tested on {tested}: chance alone changes each score."] if tested else []),
        CHOSEN,
    ]
    parts = (summary.task_title or summary.task, run.label, counted(len(run.sites), "hospital"), summary.network)
    return _sheet(
        f"{site}: results of {run.label}",
        " · ".join(filter(None, parts)),
        _answer(run, site),
        _scores(run, site),
        left,
        notices=list(_notices(run, site)),
        limits=[SYNTHETIC, *limits] if summary.synthetic else limits,
    )


def _answer(run: RunResult, site: str) -> Answer:
    """Return the hospital's score in a sentence, and the mean of all beside it where enough tell theirs."""
    summary, score = run.summary, run.score(site)
    if run.failed:
        return Answer("The study failed, so there is no result.")
    if score is None:
        why = "has too few test cases to tell its score" if run.withholds(site) else "was not tested"
        return Answer(f"{site} {why}.")
    interval, patients = between(run.intervals.get(site)), run.patients.get(site)
    aside = f" (95 % interval {interval})" if interval else ""
    of = run.tested_in_words(site)
    headline = f"At {site}, the model reaches a test {summary.metric} of {number(score)}{aside} on {of}."
    if patients and not interval:
        headline += " These are too few for an interval."
    alone = summary.changed(sites={site: run.site(site)}, agreed=summary.agreed.changed(sites=[site]))
    headline += learned([Subject(run.label, [replace(run, summary=alone)])])
    telling = [one for one in run.sites if run.score(one) is not None]
    if len(telling) < LEAST:
        return Answer(headline)
    return Answer(headline, (f"The mean over {len(telling)} hospitals is {number(summary.mean_test)}.",))


def _notices(run: RunResult, site: str) -> Iterator[Notice]:
    told = run.site(site)
    if run.failed:
        yield Notice("failed", "Failed", "The study ended before its last round.")
    by_reason: dict[str, list[int]] = {}
    for absence in run.absences():
        if absence.site == site:
            by_reason.setdefault(absence.text, []).append(absence.round)
    for reason, rounds in by_reason.items():
        yield Notice("missing", "Missing", f"round {spans(rounds)}: {reason}")
    for line in dict.fromkeys(line for lines in told.warnings.values() for line in lines):
        yield Notice("caution", "It said", line)
    for line in run.summary.stands_out.get(site, ()):
        yield Notice("caution", STANDS_OUT, line)
    if run.summary.synthetic:
        yield Notice("synthetic", "Synthetic data", "The data were drawn by the computer.")


def _scores(run: RunResult, site: str) -> Facts:
    """Yield what was measured of the hospital's own test cases, and what it gave."""
    summary, told = run.summary, run.site(site)
    yield f"Test {summary.metric}", score_text(run, site)
    others = {name: value for name, value in told.figures.items() if name != summary.metric}
    yield from ((name.replace("_", " "), number(value)) for name, value in others.items())
    what = "slices" if summary.sliced else "cases"
    for part, count in (told.cases or {}).items():
        yield f"{part.capitalize()} {what}", "sealed" if count is None else str(count)
    yield "Model of round", str(summary.selected.rounds.get(site, "–"))
    yield from _work(run, site)


def _work(run: RunResult, site: str) -> Facts:
    """Yield what a run costs a hospital."""
    told = run.site(site)
    rounds = told.contributed or 0
    yield "Rounds", f"{rounds} of {run.summary.rounds.done}"
    if rounds:
        yield "Work each round", seconds_text(None if told.seconds is None else told.seconds / rounds)
        yield "Sent in all", bytes_text(told.bytes_up)
        yield "Received in all", bytes_text(told.bytes_down)
    if spent := run.spent.get(site):
        yield "Privacy (ε)", "no bound" if spent.study is None else f"{spent.study:.3f} at δ {spent.delta:g}"
