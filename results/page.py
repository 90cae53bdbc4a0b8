"""Create a file of results/ from the finished cells; every statement about a result comes from the verdict."""

import math
import os
import platform
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from scipy import stats

from medsilo_lab.study.evidence import LEAST_SEEDS, LEVEL, holm
from medsilo_lab.study.verdict_file import Verdict, VerdictRow
from results.figures import results_of
from results.making import Comparison
from results.pages import HAR, LOOKS, Page, Part
from results.result_files import DECLARED, MEAN, Study, Table
from results.shifts import tables as tables_of_shifts
from results.tables import differences, points, scores

REMARK = "remark"  # a handwritten remark above a file's table; a rewritten file keeps the remark


def study(
    name: str, page: Page, parts: Sequence[Comparison], failures: Sequence[str] = (), remarks: Sequence[str] = ()
) -> Study:
    header: dict[str, str | Sequence[str]] = {"title": page.title, "data": page.data}
    if left := _unfinished(parts):
        header["unfinished"] = left
    header |= {
        "command": f"python -m results {name} --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"Python {platform.python_version()}, torch {torch.__version__}, one thread of {os.cpu_count()} CPU "
        "cores that did other work, too",
        "about": page.words.split("\n\n"),
        "declared": [f"{_named(part)}{_question(part.part)}" for part in parts],
        "runs": [_done(part) for part in parts],
        "failed": list(failures),
        "finding": [f"{_named(part)}{said}" for part in parts if not part.part.elsewhere for said in _findings(part)],
        REMARK: list(remarks),
        "compare": [f"{_named(part)}{line}" for part in parts for line in _repeated(part.part)],
    }
    if page.parts[0].made_up:
        return Study(header, list(tables_of_shifts(parts)))
    return Study(header, [table for part in parts if part.compared() for table in _tables(part)])


def _named(comparison: Comparison) -> str:
    shift = comparison.part.made_up
    power = f", {shift.axis} {shift.power:g}" if shift else ""
    return f"{comparison.part.title}{power}: " if comparison.part.title else ""


def _question(part: Part) -> str:
    if part.made_up:
        return f"{part.baseline} less FedAvg, and less {part.made_up.control}, in the mean over sites"
    return f"mean over sites, against {part.baseline}; {part.why}"


def _unfinished(parts: Sequence[Comparison]) -> str:
    cells = [cell for part in parts for cell in part.cells]
    done = sum(1 for cell in cells if cell.summary())
    return "" if done == len(cells) else f"{done} of {len(cells)} runs"


def _done(comparison: Comparison) -> str:
    cells = comparison.cells
    finished = [summary for cell in cells if (summary := cell.summary())]
    whole, asked = comparison.whole_seeds(), len({cell.seed for cell in cells})
    hours = sum(summary.seconds or 0 for summary in finished) / 3600
    packages = Counter(
        ", ".join(f"{name} {own.version} ({(own.hash or '')[:12]})" for name, own in one.packages.items())
        for one in finished
    )
    made = "".join(f", {count} with {package}" for package, count in packages.items())
    compared = {cell.row for cell in comparison.compared()}
    missing = [row.title for row in dict.fromkeys(cell.row for cell in cells) if row not in compared]
    seeds = f"{len(whole)} of {asked} seeds; {len(finished)} of {len(cells)} runs in {hours:.2f} hours{made}"
    if missing:
        seeds += f"; not done with these seeds: {', '.join(missing)}; p is corrected for the others"
    return f"{_named(comparison)}{seeds}"


def _findings(comparison: Comparison) -> Iterator[str]:
    if comparison.compared() and not comparison.part.made_up:
        verdict = comparison.verdict(comparison.part.baseline)
        yield verdict.headline
        yield from (f"{row.title}, against {row.baseline}: {row.unlike}" for row in verdict.rows if row.unlike)


def _tables(comparison: Comparison) -> Iterator[Table]:
    part, cells = comparison.part, comparison.compared()
    verdict = comparison.verdict(part.baseline)
    found = {row: results_of(cells, row) for row in dict.fromkeys(cell.row for cell in cells)}
    yield scores(part.title, cells[0].plan, found, verdict)
    yield from _declared(comparison)
    if part.elsewhere:
        return
    if part.people:
        yield _other_people(part.title, verdict)
    yield from differences(part.title, verdict)
    for other in part.beside:
        yield from differences(part.title, comparison.verdict(other), with_sites=False)


def _declared(comparison: Comparison) -> Iterator[Table]:
    """Yield the answers to the questions that a part of the page declares. The p-values are corrected only for the
    questions of this part.
    """
    there = {cell.row.title for cell in comparison.compared()}
    pairs = [pair for pair in comparison.part.asked if there.issuperset(pair)]
    verdicts = {base: comparison.verdict(base) for base in dict.fromkeys(base for _, base in pairs)}
    rows = {(row.title, base): row for base, verdict in verdicts.items() for row in verdict.rows}
    found = {pair: one for pair in pairs if (one := rows[pair].difference.mean)}
    adjusted = holm({pair: one.p for pair, one in found.items()})
    for base, verdict in verdicts.items():
        lines = []
        for pair, one in found.items():
            if pair[1] == base:
                sure = adjusted[pair] < 1 - LEVEL and not one.low <= 0 <= one.high and one.seeds >= LEAST_SEEDS
                lines.append([pair[0], points(one.mean, one.low, one.high, sure), f"{adjusted[pair]:.3g}"])
        patients = {MEAN: sum(verdict.patients.values())}
        yield Table(["", MEAN, "p"], lines, DECLARED, base, seeds=str(len(verdict.seeds)), patients=patients)


def _other_people(part: str, verdict: Verdict) -> Table:
    """Return the differences between methods with confidence intervals that apply to people outside the study; a
    person's value is the mean over seeds.

    Student's t intervals over people ignore that people in one federation are not quite independent.
    """
    base = next(row for row in verdict.rows if row.title == verdict.baseline)
    moves = {row.title: _moves(row, base) for row in verdict.rows if row is not base}
    moves = {title: own for title, own in moves.items() if len(own) > 1 and statistics.stdev(own) > 0}
    tested = {title: stats.ttest_1samp(own, 0.0) for title, own in moves.items()}
    adjusted = holm({title: float(test.pvalue) for title, test in tested.items()})
    rows = []
    for title, test in tested.items():
        low, high = test.confidence_interval(LEVEL)
        own = moves[title]
        significant = adjusted[title] < 1 - LEVEL and not math.isinf(low)
        signs = f"{sum(move > 0 for move in own)}, {sum(move < 0 for move in own)}"
        rows.append([title, points(statistics.fmean(own), low, high, significant), f"{adjusted[title]:.3g}", signs])
    head = "mean over people"
    baseline = f"{verdict.baseline}, each person one number"
    return Table(["", head, "p", "people above, below"], rows, part, baseline, patients={head: len(verdict.sites)})


def _moves(row: VerdictRow, base: VerdictRow) -> list[float]:
    pairs = [(row.sites[site], base.sites[site]) for site in row.sites]
    return [mine.mean - theirs.mean for mine, theirs in pairs if mine and theirs]


def _repeated(part: Part) -> Iterator[str]:
    yield command(part)
    if any(changed(row) for row in part.rows):
        yield "rows of changed pictures are made by this file's command alone"
    if part.data == HAR:
        yield "DATA is the folder `windows` that this file's command writes beside the part's runs"


def changed(row: str) -> bool:
    return row.partition(": ")[0].rpartition(", ")[2] in LOOKS


def command(part: Part) -> str:
    words = ["medsilo", "compare", *(["--plan", part.plan] if part.plan else ["--task", part.task])]
    words += ["--seeds", ",".join(map(str, range(part.seeds))), "--at-once", "1"]
    words += ["--device", "cpu", *(["--folds", str(part.folds)] if part.folds else [])]
    words += ["--baseline", part.baseline]
    words += [word for change in part.changes for word in ("--set", change)]
    words += ["--methods", ",".join(row for row in part.rows if ": " not in row)]
    words += [word for row in part.rows if ": " in row and not changed(row) for word in ("--row", row)]
    return shlex.join([*words, *(["--data", "DATA"] if part.data else [])])
