"""A decision sheet for each hospital of a comparison: whether joining pays there.

It is one printed page, which may be mailed to the hospital. It shows its own numbers and those of all hospitals
together, and no other hospital's.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, is_safe_name
from medsilo.report.findings import CHOSEN, SYNTHETIC, Answer
from medsilo.report.formats import between, bytes_text, number, seconds_text
from medsilo.report.gains import first_screen
from medsilo.report.read import RunResult, read
from medsilo.report.template import fill, save
from medsilo.runs import paths
from medsilo.runs.reading import read_verdict
from medsilo.runs.schema import HospitalGain, Level, Verdict
from medsilo.study.words import in_patients, points, verdict_in_words

Facts = Iterator[tuple[str, str]]


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
        answer=Answer(answer(verdict.metric, site, one)),
        notices=[],
        facts=dict(_facts(verdict, site, one, run)),
        left=left,
        first=first_screen(verdict, [site]),
        limits=list(_limits(verdict, site, one)),
    )


def answer(metric: str, site: str, one: HospitalGain) -> str:
    """Return the verdict as a sentence."""
    told, gain = verdict_in_words(one), one.gain.mean
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


def _limits(verdict: Verdict, site: str, one: HospitalGain) -> Iterator[str]:
    if verdict.synthetic:
        yield SYNTHETIC
    whom = "other seeds alone, as one patient is tested" if site in verdict.single else "other patients and other seeds"
    yield f"The gain is of {counted(len(verdict.seeds), 'seed')}; its interval is for {whom}."
    if one.word in ("promising", "too few patients", "too few seeds"):
        yield "An uncertain gain does not mean that there is none."
    yield CHOSEN


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
