"""Draw the top of a comparison's page: scores of single-site, federated and centralised training at each hospital.

A decision sheet is a printable page with the results of one hospital. The hospital may receive its decision sheet,
because the sheet shows no results of any other single hospital.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, is_safe_name
from medsilo.runs import paths
from medsilo.runs.score import interval_text
from medsilo_lab.report.findings import CHOSEN
from medsilo_lab.report.formats import seconds_text
from medsilo_lab.report.read import RunResult, read
from medsilo_lab.report.run_warnings import SYNTHETIC_NOTICE, learning
from medsilo_lab.report.template import fill, save
from medsilo_lab.study.verdict_file import (
    AGAIN,
    REFERENCES,
    HospitalVerdict,
    Level,
    PairedDifference,
    Verdict,
    VerdictRow,
    read_verdict,
)
from medsilo_lab.study.words import (
    evidence_of,
    if_unseen,
    in_patients,
    in_points,
    interval_in_points,
    needed_in_words,
    points,
    repetitions,
)
from medsilo_page.charts import Whisker, axis_of, shared_axis, whisker_chart

TITLES = {
    "better": "federated training with {} helps",
    "worse": "federated training with {} is worse than single-site",
    "inconclusive": "inconclusive whether federated training with {} helps",
}
LOOKS = {"better": 2, "worse": 4, "inconclusive": 0}
# minimum number of hospitals in a mean; from a mean of two hospitals, each hospital could calculate the other
# hospital's score
LEAST = 3
EVERYONE = "All together"


@dataclass(frozen=True)
class DifferenceLine:
    """A row in the chart of a comparison's page: for a hospital, for the mean over hospitals, or for a method. Without
    single-site training in the comparison, the fields for scores are empty.
    """

    name: str
    verdict: str
    difference: PairedDifference
    missing: str = ""
    alone: Level | None = None
    together: Level | None = None
    pooled: Level | None = None


def finding(verdict: Verdict) -> str:
    """Return the title of the comparison's page, which states the main result in a few words."""
    if verdict.first and verdict.declared:
        word = _word(verdict.first)
        words = TITLES[word].format(verdict.declared)
        if (
            word != "inconclusive"
            and verdict.hospitals
            and all(hospital.word != word for hospital in verdict.hospitals.values())
        ):
            words += " on average; for no single hospital shown"
        return words[0].upper() + words[1:]
    if verdict.hospitals:
        better = sum(one.word == "better" for one in verdict.hospitals.values())
        return f"Federated training is better at {better} of {counted(len(verdict.hospitals), 'hospital')}"
    return _ranking(verdict)


def _word(difference: PairedDifference) -> str:
    return ("better" if difference.mean > 0 else "worse") if difference.sure else "inconclusive"


def _ranking(verdict: Verdict) -> str:
    named = verdict.baseline or "none"
    asked = [row for row in verdict.rows if row.baseline and row.difference.mean and row.method not in REFERENCES]
    if not asked:
        return f"{counted(len(verdict.rows), 'configuration')} side by side"
    ahead = [
        row.title for row in asked if row.difference.mean and row.difference.mean.sure and row.difference.mean.mean > 0
    ]
    if not ahead:
        return f"No method is significantly better than {named}"
    return f"Better than {named}: {', '.join(ahead)}"


def first_screen(verdict: Verdict, sites: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the contents of the chart at the top of the page: rows, axis, caption and note.

    Args:
        sites: the sites in the chart; by default all sites
    """
    if verdict.hospitals:
        return _of_hospitals(verdict, sites)
    lines = []
    for row in verdict.rows:
        one = row.difference.mean
        if row.baseline and one:
            lines.append(DifferenceLine(row.title, _word(one), one))
    return _chart("Method", lines, verdict, "Differences are corrected for the number of methods.")


def difference_lines(verdict: Verdict, sites: Sequence[str] | None = None) -> list[DifferenceLine]:
    """Return the rows of the chart: a row for the mean over hospitals, if this mean may be shown, and a row for each
    hospital.

    Args:
        sites: the hospitals with a row; by default all hospitals
    """
    told = sites is None or len(verdict.hospitals) >= LEAST
    lines = []
    if verdict.first and verdict.declared and told:
        more = needed_in_words(verdict.needed, verdict.first)
        lines = [_with_scores(DifferenceLine(EVERYONE, "", verdict.first, more), verdict, verdict.declared)]
    for site, hospital in verdict.hospitals.items():
        if sites is None or site in sites:
            name = site if verdict.declared else f"{site}, {hospital.method}"
            line = DifferenceLine(
                name, hospital.word, hospital.difference, needed_in_words(hospital.needed, hospital.difference)
            )
            lines.append(_with_scores(line, verdict, hospital.method, site))
    return lines


def _of_hospitals(verdict: Verdict, sites: Sequence[str] | None) -> dict[str, Any]:
    lines = difference_lines(verdict, sites)
    beforehand = "This question was asked before the runs. " if verdict.declared else ""
    number = counted(len(verdict.hospitals), "hospital")
    note = f"{beforehand}Verdicts and intervals of hospitals are corrected for {number}"
    note += "." if verdict.declared else " and all methods."
    if any(line.difference.unseen for line in lines):
        note += " Verdicts rest on the thick line, which is for patients like those tested. The thin one allows for a "
        note += "kind of patient that was not tested, and fails."
    if any(one.missing for one in lines):
        note += " With as many patients or repetitions as a line names, four of five such studies show its difference."
    return _chart("Hospital", lines, verdict, note, lines if sites is None else lines[-1:])


def _with_scores(line: DifferenceLine, verdict: Verdict, title: str | None, site: str | None = None) -> DifferenceLine:
    """Add the scores of single-site, federated and centralised training to a row of the chart. `site` is the hospital
    of the row; if `site` is None, the scores are means over hospitals.
    """

    def level(row: VerdictRow) -> Level | None:
        return row.sites.get(site) if site else row.score

    together = next((level(row) for row in verdict.rows if row.title == title), None)
    alone = [found for row in verdict.rows if row.method == "local" and (found := level(row))]
    pooled = [found for row in verdict.rows if row.method == "central" and (found := level(row))]
    if not together or not alone:
        return line
    # if there are several single-site configurations, use the configuration with which the federated method was
    # compared
    nearest = min(alone, key=lambda found: abs(together.mean - found.mean - line.difference.mean))
    return replace(line, together=together, alone=nearest, pooled=pooled[0] if len(pooled) == 1 else None)


def _chart(
    head: str,
    lines: Sequence[DifferenceLine],
    verdict: Verdict,
    note: str,
    about: Sequence[DifferenceLine] | None = None,
) -> dict[str, Any]:
    """Return a chart with all rows on a common axis.

    Args:
        about: rows whose sample the caption describes; by default all rows
    """
    # the numbers of seeds are shown only if the rows of the chart have different numbers of seeds
    differ = len({line.difference.seeds for line in lines}) > 1
    scores = all(one.together for one in lines)
    drawn = [_whisker(one, in_points(one.difference, differ), scores) for one in lines]
    marks = shared_axis(drawn, zero=not scores) if drawn else []
    rows = [
        {
            "name": one.name,
            "verdict": one.verdict,
            "look": one.verdict or "everyone",
            "chart": whisker_chart(whisker, marks, f"difference-{place}", _title(one, scores), zero=not scores),
            "points": f"{points(one.difference.mean)} points",
            "interval": interval_in_points(one.difference),
            "n": _tested(one, differ),
            "more": [
                whisker.words,
                *filter(
                    None,
                    (
                        in_patients(verdict.metric, one.difference.mean) if one.difference.sure and one.verdict else "",
                        if_unseen(one.difference),
                        one.missing,
                    ),
                ),
            ],
        }
        for place, (one, whisker) in enumerate(zip(lines, drawn, strict=True))
    ]
    return {
        "head": head,
        "rows": rows,
        "note": note,
        "axis": axis_of(marks, signed=not scores) if marks else "",
        "scores": scores,
        "asked": verdict.declared or "with the method that the row names",
        "pooled": any(one.pooled for one in lines),
        "caption": f"Test {verdict.metric}" if scores else f"Difference in test {verdict.metric}, in points",
        "sample": _sample_of(about or lines),
    }


def _title(line: DifferenceLine, scores: bool) -> str:
    if not (scores and line.alone and line.together):
        return f"{line.name}: difference in points"
    pooled = f", {line.pooled} on all data together" if line.pooled else ""
    return f"{line.name}: {line.alone} alone, {line.together} together{pooled}"


def _tested(line: DifferenceLine, differ: bool) -> str:
    """Describe the number of test patients of a row in the chart. If `differ` is true, also describe the number of
    seeds.
    """
    number = line.difference.patients
    whom = f"n = {number:,}" if number else "n not disclosed"
    return f"{whom}, {repetitions(line.difference.seeds)}" if differ else whom


def _whisker(line: DifferenceLine, words: str, scores: bool) -> Whisker:
    """Draw the difference or the federated score of a row, with the confidence interval of the difference.

    An interval around the federated score excludes the single-site score only if the difference is significant.
    """
    found, look = line.difference, 0 if scores else LOOKS.get(line.verdict, 5)
    if scores and line.together and line.alone:
        value, unit, alone = line.together.mean, 1.0, line.alone.mean
        pooled = line.pooled.mean if line.pooled else None
        shift = value - found.mean
    else:
        value, unit, alone, pooled, shift = 100 * found.mean, 100.0, None, None, 0.0

    def placed(ends: tuple[float, float]) -> tuple[float, float]:
        return shift + unit * ends[0], shift + unit * ends[1]

    if found.open:
        return Whisker(value, None, look, words, None, alone, pooled)
    wider = placed(found.unseen) if found.unseen else None
    return Whisker(value, placed(found.interval), look, words, wider, alone, pooled)


def _sample_of(lines: Sequence[DifferenceLine]) -> str:
    seeds = max((line.difference.seeds for line in lines), default=0)
    patients = max((one.difference.patients or 0 for one in lines), default=0)
    tested = counted(patients, "test patient") if patients else "test patients not disclosed"
    return f"n = {tested}, {repetitions(seeds)}"


def write_sheets(folder: Path, leaving: Callable[[Path], Sequence[str]]) -> list[Path]:
    """Write a decision sheet for each hospital of a comparison, and return the paths of the sheets.

    Args:
        leaving: a function that lists the numbers and tensors that leave a hospital in a run
    """
    verdict = read_verdict(folder)
    if odd := [site for site in verdict.hospitals if not is_safe_name(site)]:
        raise MedsiloError("a hospital's name can't be a file name; correct verdict.json", odd[0])
    if not verdict.hospitals:
        raise MedsiloError(
            "--hospitals: no difference from single-site training is known; compare with the method local, too"
        )
    first = {run.row: folder / run.run for run in reversed(verdict.runs)}
    pages = {
        site: of_comparison(verdict, site, hospital, read(first[hospital.method]), leaving(first[hospital.method]))
        for site, hospital in verdict.hospitals.items()
    }
    return [save(page, folder / paths.HOSPITALS / f"{site}.html") for site, page in pages.items()]


def of_comparison(verdict: Verdict, site: str, one: HospitalVerdict, run: RunResult, left: Sequence[str]) -> str:
    """Return a hospital's decision sheet as HTML, given the first run of the method that the sheet describes."""
    return fill(
        "sheet.html",
        f"{site}: {TITLES[one.word].format(one.method)}",
        description=run.summary.description,
        context=f"Hospital's decision · {verdict.task_title} · {counted(len(verdict.sites), 'hospital')}",
        answer=answer(verdict.metric, site, one),
        above=[SYNTHETIC_NOTICE] if verdict.synthetic else [],
        notices=learning({one.method: [run]}, site),
        facts=dict(_facts(verdict, site, one, run)),
        left=left,
        first=first_screen(verdict, [site]),
        limits=list(_limits(verdict, site, one)),
    )


def answer(metric: str, site: str, one: HospitalVerdict) -> str:
    """Describe a hospital's verdict in sentences: the difference, its confidence interval and its sample. If the
    verdict is unclear, a sentence names the sample that a clear verdict needs.
    """
    difference = one.difference
    what = f"test {metric} is {points(abs(difference.mean))[1:]} points {'higher' if difference.mean > 0 else 'lower'}"
    told = f"{one.word.capitalize()}: at {site}, {what} with {one.method} than with single-site training"
    of = in_patients(metric, difference.mean) if difference.sure else ""
    further = [if_unseen(difference), needed_in_words(one.needed, difference)]
    said = f"{told} ({evidence_of(difference)}){f': {of}' if of else ''}."
    return " ".join([said, *(f"{words[0].upper()}{words[1:]}." for words in further if words)])


def _facts(verdict: Verdict, site: str, one: HospitalVerdict, run: RunResult) -> Iterator[tuple[str, str]]:
    known = [(row, found) for row in verdict.rows if (found := row.sites.get(site))]
    joined = next(found for row, found in known if row.title == one.method)
    alone = [found for row, found in known if row.method == "local"]
    # if there are several single-site configurations, the configuration with which the federated method was compared
    # comes first
    alone.sort(key=lambda found: abs(joined.mean - found.mean - one.difference.mean))
    yield f"Test {verdict.metric}, federated", _level(joined)
    if alone:
        yield f"Test {verdict.metric}, single-site", _level(alone[0])
    tested = verdict.patients.get(site)
    # runs with different seeds may have different test patients
    same = tested is None or run.patients.get(site) == tested
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
    """Describe the hospital's number of training cases. If the total over all hospitals would reveal the number of
    another hospital, the total is left out.
    """
    each = {own: (run.site(own).cases or {}).get("train") for own in run.sites}
    here, everywhere = each.get(site), [cases for cases in each.values() if cases]
    if not here:
        return ""
    unit = "slice" if run.summary.sliced else "case"
    more = f", {sum(everywhere)} at {len(everywhere)} hospitals" if len(everywhere) >= LEAST else ""
    return f"{counted(here, unit)} here{more}"


def _level(level: Level) -> str:
    return f"{level} ({interval_text((level.low, level.high), level.n)})"


def _limits(verdict: Verdict, site: str, one: HospitalVerdict) -> Iterator[str]:
    whom = f"{AGAIN} alone, as one patient is tested" if site in verdict.single else f"other patients and {AGAIN}"
    yield f"The difference is of {repetitions(len(verdict.seeds))}; its interval is for {whom}."
    if one.word == "inconclusive":
        yield "An inconclusive difference does not mean that there is none."
    yield CHOSEN
