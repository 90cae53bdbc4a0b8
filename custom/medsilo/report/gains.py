"""The first screen of a comparison: the question, and each hospital's gain as a picture, in words, with its verdict.

A decision sheet is the same for one hospital, one printed page that may be mailed to it. It shows that hospital's own
numbers and those of all hospitals together, and no other hospital's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, is_safe_name
from medsilo.report.charts import Drawing, marker, ticks
from medsilo.report.findings import CHOSEN, SYNTHETIC, learned
from medsilo.report.formats import between, bytes_text, number, seconds_text
from medsilo.report.panels import Subject
from medsilo.report.read import RunResult, read
from medsilo.report.template import fill, save
from medsilo.runs import paths
from medsilo.runs.reading import read_verdict
from medsilo.runs.schema import HospitalGain, Level, PairedDifference, Verdict
from medsilo.study.words import in_patients, in_points, points, verdict_in_words

LOOKS = {"worth it": 2, "promising": 3, "no gain": 1, "too few patients": 0, "too few seeds": 0}  # the marker
LOOKS |= {"surely higher": 2, "surely lower": 4, "open": 0}
LEAST = 3  # hospitals behind a number of all: of two, each could work out the other's
WIDTH, ROW, EDGE = 320, 26, 16
EVERYONE = "All together"


@dataclass(frozen=True)
class GainLine:
    """A line of the first screen."""

    name: str
    verdict: str
    look: str  # the verdict without numbers
    found: PairedDifference


def first_screen(verdict: Verdict, sites: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the question, its lines with their pictures on one scale, and what to know of them. sites: only these."""
    if verdict.gains:
        return _of_hospitals(verdict, sites)
    lines = []
    for row in verdict.rows:
        one = row.difference.mean
        if row.against and one:
            word = ("surely higher" if one.mean > 0 else "surely lower") if one.sure else "open"
            lines.append(GainLine(row.title, word, word, one))
    asked = f"Which method is better than {verdict.against}?" if verdict.against else "How do these methods compare?"
    return _drawn(asked, "Method", lines, verdict, "Differences are corrected for all lines (Holm).")


def _of_hospitals(verdict: Verdict, sites: Sequence[str] | None) -> dict[str, Any]:
    told = sites is None or len(verdict.gains) >= LEAST
    lines = [GainLine(EVERYONE, "", "", verdict.first)] if verdict.first and told else []
    for site, one in verdict.gains.items():
        if sites is None or site in sites:
            name = site if verdict.declared else f"{site}, {one.method}"
            lines.append(GainLine(name, verdict_in_words(one), one.word, one.gain))
    asked = f"with {verdict.declared}" if verdict.declared else "with any of these methods"
    beforehand = "This question was asked before the runs. " if verdict.declared else ""
    note = f"{beforehand}The verdicts are corrected for {counted(len(verdict.gains), 'hospital')} (Holm)"
    note += "." if verdict.declared else " and all methods."
    return _drawn(f"Does training together {asked} pay, against training alone?", "Hospital", lines, verdict, note)


def _drawn(question: str, head: str, lines: Sequence[GainLine], verdict: Verdict, note: str) -> dict[str, Any]:
    ends = [end for one in lines for end in (one.found.low, one.found.high)]
    marks = [100 * mark for mark in ticks(min([0.0, *ends]), max([0.0, *ends]))] if lines else []
    rows = [
        {
            "name": one.name,
            "verdict": one.verdict,
            "look": one.look.replace(" ", "-") or "everyone",
            "chart": _whisker(one, marks, f"gain-{place}"),
            "points": in_points(one.found),
            "patients": in_patients(verdict.metric, one.found.mean) if one.verdict else "",  # the sentence says it
        }
        for place, one in enumerate(lines)
    ]
    return {"question": question, "head": head, "rows": rows, "axis": _axis(marks), "note": note}


def _place(mark: float, marks: Sequence[float]) -> float:
    return round(EDGE + (mark - marks[0]) / (marks[-1] - marks[0]) * (WIDTH - 2 * EDGE), 1)


def _whisker(one: GainLine, marks: Sequence[float], key: str) -> Markup:
    svg = Drawing.start(WIDTH, ROW, key, f"{one.name}: gain in points", in_points(one.found), small=True)
    low, mean, high = (_place(100 * value, marks) for value in (one.found.low, one.found.mean, one.found.high))
    zero, middle = _place(0, marks), ROW / 2
    for mark in marks:
        svg.path("gridline", f"M{_place(mark, marks)} 0V{ROW}")
    svg.path("axis", f"M{zero} 0V{ROW}")
    svg.path("whisker", f"M{low} {middle}H{high}")
    svg.path("mark", marker(LOOKS.get(one.look, 5), mean, middle))
    return svg.markup()


def _axis(marks: Sequence[float]) -> Markup:
    """Return the numbers below the pictures, for the eye alone: each line says its own in words."""
    look = {"class": "chart picture", "viewBox": f"0 0 {WIDTH} 16", "style": f"max-width:{WIDTH}px"}
    svg = Drawing(ElementTree.Element("svg", look | {"aria-hidden": "true"}))
    for mark in marks:
        text = f"{mark:+g}".replace("-", "−") if mark else "0"
        svg.text(text, _place(mark, marks), 12, "middle")
    return svg.markup()


def write_sheets(folder: Path, leaving: Callable[[Path], Sequence[str]]) -> list[Path]:
    """Write a sheet for each hospital of a comparison, and return where they are. leaving: what leaves in a run."""
    verdict = read_verdict(folder)
    if odd := [site for site in verdict.gains if not is_safe_name(site)]:
        raise MedsiloError("a hospital's name there can't be a file's name; correct verdict.json", odd[0])
    if not verdict.gains:
        raise MedsiloError("--hospitals: no gain over training alone is known; compare with the method local, too")
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
        f"Decision sheet for {site}",
        context=f"{verdict.task_title} · {counted(len(verdict.sites), 'hospital')} · {one.method}",
        answer=answer(verdict.metric, site, one) + learned([Subject(one.method, [run])]),
        notices=[],
        facts=dict(_facts(verdict, site, one, run)),
        left=left,
        first=first_screen(verdict, [site]),
        limits=list(_limits(verdict, site, one)),
    )


def answer(metric: str, site: str, one: HospitalGain) -> str:
    """Return the verdict as a sentence."""
    (told, _, needed), gain = verdict_in_words(one).partition(": "), one.gain.mean
    told += f" ({needed})" * bool(needed)
    what = f"test {metric} is {points(abs(gain))[1:]} points {'higher' if gain > 0 else 'lower'}"
    what = in_patients(metric, gain) or what
    return f"{told[0].upper()}{told[1:]}: at {site}, {what} with {one.method} than with training alone."


def _facts(verdict: Verdict, site: str, one: HospitalGain, run: RunResult) -> Iterator[tuple[str, str]]:
    known = [(row, found) for row in verdict.rows if (found := row.sites.get(site))]
    joined = next(found for row, found in known if row.title == one.method)
    alone = [found for row, found in known if row.method == "local"]
    # Where there are several, of other norms, it is the one that the gain is against.
    alone.sort(key=lambda found: abs(joined.mean - found.mean - one.gain.mean))
    yield f"Test {verdict.metric}, together", _level(joined)
    if alone:
        yield f"Test {verdict.metric}, alone", _level(alone[0])
    yield "Tested on", run.tested_in_words(site) + f", {counted(len(verdict.seeds), 'seed')}"
    told = run.site(site)
    rounds = told.contributed or 0
    yield "Rounds", f"{rounds} of {run.summary.rounds.done}"
    if rounds:
        yield "Work each round", seconds_text(None if told.seconds is None else told.seconds / rounds)
        yield "Sent in all", bytes_text(told.bytes_up)
        yield "Received in all", bytes_text(told.bytes_down)
    if spent := run.spent.get(site):
        yield "Privacy (ε)", "no bound" if spent.study is None else f"{spent.study:.3f} at δ {spent.delta:g}"


def _level(found: Level) -> str:
    return f"{number(found.mean)} ({between((found.low, found.high))})"


def _limits(verdict: Verdict, site: str, one: HospitalGain) -> Iterator[str]:
    if verdict.synthetic:
        yield SYNTHETIC
    whom = "other seeds alone, as one patient is tested" if site in verdict.single else "other patients and other seeds"
    yield f"The gain is of {counted(len(verdict.seeds), 'seed')}, each one repetition; its interval is for {whom}."
    if one.word in ("promising", "too few patients", "too few seeds"):
        yield "An uncertain gain does not mean that there is none."
    yield CHOSEN
