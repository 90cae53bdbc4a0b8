"""docs/results/*.md, made of the cells that are done: every word about what came out is the verdict's."""

import math
import os
import platform
import shlex
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from scipy import stats

from benchmarks.results.figures import results_of
from benchmarks.results.making import Comparison
from benchmarks.results.pages import HAR, LOOKS, Page, Part
from benchmarks.results.shifts import sections
from benchmarks.results.tables import MOST_SITES, NAMES, pays, sure, table
from medsilo_lab.study.evidence import LEVEL, holm
from medsilo_lab.study.verdict_file import PairedDifference, Verdict, VerdictRow

END = "<!-- end of what the command wrote -->"  # what stands below is kept


def document(name: str, page: Page, parts: Sequence[Comparison], failures: Sequence[str] = ()) -> str:
    """Return the page."""
    lines = [
        f"# {page.title}",
        "",
        *_unfinished(parts),
        "\n\n".join(textwrap.fill(words, 120) for words in page.words.split("\n\n")),
        "",
        f"Written on {time.strftime('%Y-%m-%d', time.gmtime())} by",
        "",
        f"    python -m benchmarks.results {name} --write",
        "",
        "which goes on where it was stopped, and stops after `--minutes N`.",
        f"Python {platform.python_version()}, torch {torch.__version__}; one process with one thread on "
        f"{os.cpu_count()} CPU cores that were busy with other work, so that seconds say little.",
        "",
        *(_done(part) for part in parts),
        *(f"* FAILED: {failure}" for failure in failures),
    ]
    if page.parts[0].made_up:
        return "\n".join([*lines, *sections(parts), "", END, ""])
    for part in parts:
        lines += ["", *_section(part)]
    return "\n".join([*lines, "", END, ""])


def _unfinished(parts: Sequence[Comparison]) -> list[str]:
    """Return a line that says that runs are missing, if they are."""
    cells = [cell for part in parts for cell in part.cells]
    done = sum(1 for cell in cells if cell.summary())
    if done == len(cells):
        return []
    return [f"**Unfinished: {done} of {len(cells)} runs are done. No table of other pages uses these numbers.**", ""]


def _done(comparison: Comparison) -> str:
    """Return a line that says how much of a part is there, and how much is not."""
    cells = comparison.cells
    finished = [summary for cell in cells if (summary := cell.summary())]
    whole, asked = comparison.whole_seeds(), len({cell.seed for cell in cells})
    hours = sum(summary.seconds or 0 for summary in finished) / 3600
    packages = Counter(
        ", ".join(f"{name} {own.version} ({(own.hash or '')[:12]})" for name, own in one.packages.items())
        for one in finished
    )
    made = "".join(f", {count} with {package}" for package, count in packages.items())
    shift = comparison.part.made_up
    power = f", {shift.axis} {shift.power:g}" if shift else ""
    named = f"**{comparison.part.title}{power}**: " if comparison.part.title else ""
    compared = {cell.row for cell in comparison.compared()}
    missing = [row.title for row in dict.fromkeys(cell.row for cell in cells) if row not in compared]
    seeds = (
        f"{len(whole)} of {asked} seeds done; {len(finished)} of {len(cells)} runs in {hours:.2f} hours of runs{made}."
    )
    if missing:
        seeds += f" Rows not done with these seeds: {', '.join(missing)}; p is corrected for those that are."
    return f"* {named}{seeds}"


def _section(comparison: Comparison) -> list[str]:
    """Return what one part says."""
    part, cells = comparison.part, comparison.compared()
    lines = [f"## {part.title}", ""] if part.title else []
    lines += [f"Declared before any run: mean over sites, against {part.against}; {part.why}.", ""]
    if not cells:
        return [*lines, "No seed is done for all rows yet, so nothing is compared.", "", *_repeated(part)]
    verdict = comparison.verdict(part.against)
    found = {row: results_of(cells, row) for row in dict.fromkeys(cell.row for cell in cells)}
    lines += [f"**{verdict.headline}**", "", *table(cells[0].plan, found), ""]
    mark = "###" if part.title else "##"
    if part.people:
        lines += [f"{mark} For other people", "", *_other_people(verdict), ""]
    lines += [f"#{line}" if part.title and line.startswith("## ") else line for line in sure(verdict)]
    if len(verdict.sites) > MOST_SITES and any(any(row.joining.values()) for row in verdict.rows):
        lines += [_joining(verdict), ""]
    for other in part.beside:
        held = comparison.verdict(other)
        lines += [f"{mark} Against {held.against}, to explore", "", *_differences(held), ""]
    told = [f"* **{row.title}**: `{' '.join(row.changes)}`" for row in found if _says_more(row.title, row.changes)]
    return [*lines, *told, *([""] if told else []), *_repeated(part)]


def _says_more(title: str, changes: Sequence[str]) -> bool:
    return changes != (f"algorithm.name={title}",) and ":" not in title


def _joining(verdict: Verdict) -> str:
    """Return in one line whether joining pays, where there are too many sites for a table."""
    counts = Counter(pays(verdict, site) for site in verdict.sites)
    told = "; ".join(f"{answer} at {count}" for answer, count in counts.most_common())
    return (
        f"Does joining pay? Over {len(verdict.sites)} sites, each with its own model of the same norm, corrected for "
        f"all methods and all sites together: {told}."
    )


def _other_people(verdict: Verdict) -> Iterator[str]:
    """Yield the differences again with one number for each person, its mean over seeds: for other people.

    Student's t over people. They learn together and are not quite independent, which it does not know.
    """
    base = next(row for row in verdict.rows if row.title == verdict.against)
    moves = {row.title: _moves(row, base) for row in verdict.rows if row is not base}
    moves = {title: own for title, own in moves.items() if len(own) > 1 and statistics.stdev(own) > 0}
    tested = {title: stats.ttest_1samp(own, 0.0) for title, own in moves.items()}
    adjusted = holm({title: float(test.pvalue) for title, test in tested.items()})
    yield (
        f"Every site is one person. Here each is one number, the difference from {verdict.against} averaged over "
        f"seeds; mean over {len(verdict.sites)} people with its 95 % interval by Student's t, p after Holm's "
        "correction. To explore; people learn together, which t does not know."
    )
    yield ""
    yield from ("| row | mean over people | p | people above, below |", "|---|---|---|---|")
    for title, test in tested.items():
        low, high = test.confidence_interval(LEVEL)
        own = moves[title]
        text = _points(statistics.fmean(own), low, high, adjusted[title] < 1 - LEVEL)
        signs = f"{sum(move > 0 for move in own)}, {sum(move < 0 for move in own)}"
        yield f"| {title} | {text} | {_p(adjusted[title])} | {signs} |"


def _moves(row: VerdictRow, base: VerdictRow) -> list[float]:
    """Return each site's difference from the base."""
    pairs = [(row.sites[site], base.sites[site]) for site in row.sites]
    return [mine.mean - theirs.mean for mine, theirs in pairs if mine and theirs]


def _differences(verdict: Verdict) -> Iterator[str]:
    yield "Exploratory, like all that was not declared; intervals and p as above."
    yield ""
    names = dict(zip(("mean", "pooled", "worst"), NAMES, strict=True))
    yield f"| row | {' | '.join(f'{name} | p' for name in names.values())} |"
    yield f"|---|{'---|---|' * len(names)}"
    for row in verdict.rows:
        if row.against:
            cells = [_difference(getattr(row.difference, name)) for name in names]
            yield f"| {row.title} | {' | '.join(cells)} |"


def _difference(found: PairedDifference | None) -> str:
    return (
        "– | –" if found is None else f"{_points(found.mean, found.low, found.high, found.sure)} | {_p(found.adjusted)}"
    )


def _points(mean: float, low: float, high: float, is_sure: bool) -> str:
    text = f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})".replace("-", "−")
    return f"**{text}**" if is_sure and not math.isinf(low) else text


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _repeated(part: Part) -> list[str]:
    lines = ["The same by hand:", "", f"    {command(part)}"]
    if any(changed(row) for row in part.rows):
        lines += ["", "Rows of changed pictures are left out there: only this page's command makes them."]
    if part.data == HAR:
        lines += ["", "DATA is the folder `windows` that the command of this page writes beside the part's runs."]
    return lines


def changed(row: str) -> bool:
    """Return whether a row's pictures are changed before anybody trains."""
    return row.partition(": ")[0].rpartition(", ")[2] in LOOKS


def command(part: Part) -> str:
    """Return the `medsilo compare` that runs a part."""
    words = ["medsilo", "compare", *(["--plan", part.plan] if part.plan else ["--task", part.task])]
    words += ["--seeds", ",".join(map(str, range(part.seeds))), "--at-once", "1"]
    words += ["--device", "cpu", *(["--folds", str(part.folds)] if part.folds else [])]
    words += ["--against", part.against]
    words += [word for change in part.changes for word in ("--set", change)]
    words += ["--methods", ",".join(row for row in part.rows if ": " not in row)]
    words += [word for row in part.rows if ": " in row and not changed(row) for word in ("--row", row)]
    return shlex.join([*words, *(["--data", "DATA"] if part.data else [])])
