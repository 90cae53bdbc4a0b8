"""The first screen of a comparison: the question, and each hospital's difference as a picture, with its verdict.

A decision sheet is the same for one hospital, one printed page that may be mailed to it. It shows that hospital's own
numbers and those of all hospitals together, and no other hospital's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, is_safe_name
from medsilo.runs import paths
from medsilo_lab.report.charts import Whisker, shared_axis, whisker_chart
from medsilo_lab.report.findings import CHOSEN, SYNTHETIC_NOTICE, learned
from medsilo_lab.report.formats import between, number, seconds_text
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import RunResult, read
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.verdict_file import (
    AGAIN,
    REFERENCES,
    HospitalGain,
    Level,
    PairedDifference,
    Verdict,
    read_verdict,
)
from medsilo_lab.study.words import evidence_of, in_patients, in_points, needed_in_words, points, repetitions

TITLES = {
    "better": "federated training with {} helps",
    "worse": "federated training with {} is worse than single-site",
    "inconclusive": "inconclusive whether federated training with {} helps",
}
LOOKS = {"better": 2, "worse": 4, "inconclusive": 0}  # the marker
LEAST = 3  # hospitals behind a number of all: of two, each could work out the other's
EVERYONE = "All together"


@dataclass(frozen=True)
class GainLine:
    """A line of the first screen."""

    name: str
    verdict: str
    difference: PairedDifference
    missing: str = ""  # what would make a verdict of it


def finding(verdict: Verdict) -> str:
    """Return the comparison's title: the answer to its first question, in a few words."""
    if verdict.first and verdict.declared:
        word = _word(verdict.first)
        words = TITLES[word].format(verdict.declared)
        if word != "inconclusive" and verdict.gains and all(one.word != word for one in verdict.gains.values()):
            words += " on average; for no single hospital shown"
        return words[0].upper() + words[1:]
    if verdict.gains:
        better = sum(one.word == "better" for one in verdict.gains.values())
        return f"Federated training is better at {better} of {counted(len(verdict.gains), 'hospital')}"
    return _ranking(verdict)


def _word(found: PairedDifference) -> str:
    return ("better" if found.mean > 0 else "worse") if found.sure else "inconclusive"


def _ranking(verdict: Verdict) -> str:
    """Return which federated methods are better than the baseline, in a few words."""
    named = verdict.against or "none"
    asked = [row for row in verdict.rows if row.against and row.difference.mean and row.method not in REFERENCES]
    if not asked:
        return f"{counted(len(verdict.rows), 'configuration')} side by side"
    ahead = [
        row.title for row in asked if row.difference.mean and row.difference.mean.sure and row.difference.mean.mean > 0
    ]
    if not ahead:
        return f"No method is significantly better than {named}"
    return f"Better than {named}: {', '.join(ahead)}"


def first_screen(verdict: Verdict, sites: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the question, its lines with their pictures on one scale, and what to know of them. sites: only these."""
    if verdict.gains:
        return _of_hospitals(verdict, sites)
    lines = []
    for row in verdict.rows:
        one = row.difference.mean
        if row.against and one:
            lines.append(GainLine(row.title, _word(one), one))
    asked = f"Which method is better than {verdict.against}?" if verdict.against else "How do these methods compare?"
    return _chart(asked, "Method", lines, verdict, "Differences are corrected for the number of methods.")


def _of_hospitals(verdict: Verdict, sites: Sequence[str] | None) -> dict[str, Any]:
    told = sites is None or len(verdict.gains) >= LEAST
    lines = [GainLine(EVERYONE, "", verdict.first)] if verdict.first and told else []
    for site, one in verdict.gains.items():
        if sites is None or site in sites:
            name = site if verdict.declared else f"{site}, {one.method}"
            lines.append(GainLine(name, one.word, one.gain, needed_in_words(one.needed, one.gain)))
    asked = f"with {verdict.declared}" if verdict.declared else "with any of these methods"
    beforehand = "This question was asked before the runs. " if verdict.declared else ""
    note = (
        f"{beforehand}Verdicts and intervals of hospitals are corrected for {counted(len(verdict.gains), 'hospital')}"
    )
    note += "." if verdict.declared else " and all methods."
    if any(one.missing for one in lines):
        note += " With as many patients or repetitions as a line names, four of five such studies show its difference."
    question = f"Does federated training {asked} help, against single-site training?"
    return _chart(question, "Hospital", lines, verdict, note, lines if sites is None else lines[-1:])


def _chart(
    question: str,
    head: str,
    lines: Sequence[GainLine],
    verdict: Verdict,
    note: str,
    about: Sequence[GainLine] | None = None,
) -> dict[str, Any]:
    """about: the lines of which the caption says what they rest on; None: all."""
    differ = len({one.difference.seeds for one in lines}) > 1  # else the caption says how many there are
    drawn = [
        Whisker(100 * found.mean, (100 * low, 100 * high), LOOKS.get(one.verdict, 5), in_points(found, differ))
        for one, found, (low, high) in ((one, one.difference, one.difference.interval) for one in lines)
    ]
    marks = shared_axis(drawn)
    rows = [
        {
            "name": one.name,
            "verdict": one.verdict,
            "look": one.verdict or "everyone",
            "chart": whisker_chart(
                whisker, marks, f"gain-{place}", f"{one.name}: difference in points", whisker is drawn[-1]
            ),
            "points": whisker.words,
            "patients": in_patients(verdict.metric, one.difference.mean) if one.difference.sure and one.verdict else "",
            "missing": one.missing,
        }
        for place, (one, whisker) in enumerate(zip(lines, drawn, strict=True))
    ]
    told = {"caption": f"Difference in test {verdict.metric}", "n": _sample_of(about or lines)}
    return {"question": question, "head": head, "rows": rows, "note": note, **told}


def _sample_of(lines: Sequence[GainLine]) -> str:
    """Return what the lines of a first screen rest on: all together, else the most that one does."""
    patients = max((one.difference.patients or 0 for one in lines), default=0)
    seeds = max((one.difference.seeds for one in lines), default=0)
    tested = counted(patients, "test patient") if patients else "test patients not disclosed"
    return f"n = {tested}, {repetitions(seeds)}"


def write_sheets(folder: Path, leaving: Callable[[Path], Sequence[str]]) -> list[Path]:
    """Write a sheet for each hospital of a comparison, and return where they are. leaving: what leaves in a run."""
    verdict = read_verdict(folder)
    if odd := [site for site in verdict.gains if not is_safe_name(site)]:
        raise MedsiloError("a hospital's name there can't be a file's name; correct verdict.json", odd[0])
    if not verdict.gains:
        raise MedsiloError(
            "--hospitals: no difference from single-site training is known; compare with the method local, too"
        )
    first = {one.row: folder / one.run for one in reversed(verdict.runs)}
    pages = {
        site: of_comparison(verdict, site, one, read(first[one.method]), leaving(first[one.method]))
        for site, one in verdict.gains.items()
    }
    return [save(page, folder / paths.HOSPITALS / f"{site}.html") for site, page in pages.items()]


def of_comparison(verdict: Verdict, site: str, one: HospitalGain, run: RunResult, left: Sequence[str]) -> str:
    """The sheet as text. run: the first one of the method that is asked about."""
    return fill(
        "sheet.html",
        f"{site}: {TITLES[one.word].format(one.method)}",
        description=run.summary.description,
        context=f"Hospital's decision · {verdict.task_title} · {counted(len(verdict.sites), 'hospital')}",
        answer=answer(verdict.metric, site, one) + learned([Subject(one.method, [run])]),
        above=[SYNTHETIC_NOTICE] if verdict.synthetic else [],
        notices=[],
        facts=dict(_facts(verdict, site, one, run)),
        left=left,
        first=first_screen(verdict, [site]),
        limits=list(_limits(verdict, site, one)),
    )


def answer(metric: str, site: str, one: HospitalGain) -> str:
    """Return the verdict as a sentence, with its interval and what it rests on; and what is missing."""
    gain = one.gain
    what = f"test {metric} is {points(abs(gain.mean))[1:]} points {'higher' if gain.mean > 0 else 'lower'}"
    told = f"{one.word.capitalize()}: at {site}, {what} with {one.method} than with single-site training"
    of = in_patients(metric, gain.mean) if gain.sure else ""
    missing = needed_in_words(one.needed, gain)
    said = f"{told} ({evidence_of(gain)}){f': {of}' if of else ''}."
    return f"{said} {missing[0].upper()}{missing[1:]}." if missing else said


def _facts(verdict: Verdict, site: str, one: HospitalGain, run: RunResult) -> Iterator[tuple[str, str]]:
    known = [(row, found) for row in verdict.rows if (found := row.sites.get(site))]
    joined = next(found for row, found in known if row.title == one.method)
    alone = [found for row, found in known if row.method == "local"]
    # Where there are several, of other norms, it is the one that the gain is against.
    alone.sort(key=lambda found: abs(joined.mean - found.mean - one.gain.mean))
    yield f"Test {verdict.metric}, federated", _level(joined)
    if alone:
        yield f"Test {verdict.metric}, single-site", _level(alone[0])
    tested = verdict.patients.get(site)
    same = tested is None or run.patients.get(site) == tested  # other seeds may test others
    words = run.tested_in_words(site) if same else f"at least {counted(tested or 0, 'test patient')}"
    yield "Tested on", f"{words}, {repetitions(len(verdict.seeds))}"
    if learned_from := _learned_from(site, run):
        yield "Learned from", learned_from
    told = run.site(site)
    rounds = told.contributed or 0
    yield "Rounds", f"{rounds} of {run.summary.rounds.done}"
    if rounds:
        yield "Work each round", seconds_text(None if told.seconds is None else told.seconds / rounds)
    if spent := run.spent.get(site):
        yield "Privacy (ε)", "no bound" if spent.study is None else f"{spent.study:.3f} at δ {spent.delta:g}"


def _learned_from(site: str, run: RunResult) -> str:
    """Return the training cases here and, where no hospital's follow from it, those of all."""
    each = {own: (run.site(own).cases or {}).get("train") for own in run.sites}
    here, everywhere = each.get(site), [cases for cases in each.values() if cases]
    if not here:
        return ""
    unit = "slice" if run.summary.sliced else "case"
    more = f", {sum(everywhere)} at {len(everywhere)} hospitals" if len(everywhere) >= LEAST else ""
    return f"{counted(here, unit)} here{more}"


def _level(found: Level) -> str:
    return f"{number(found.mean)} ({between((found.low, found.high))})"


def _limits(verdict: Verdict, site: str, one: HospitalGain) -> Iterator[str]:
    whom = f"{AGAIN} alone, as one patient is tested" if site in verdict.single else f"other patients and {AGAIN}"
    yield f"The difference is of {repetitions(len(verdict.seeds))}; its interval is for {whom}."
    if one.word == "inconclusive":
        yield "An inconclusive difference does not mean that there is none."
    yield CHOSEN
