"""A comparison in Markdown: its scores, and how sure their differences are."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.results.figures import CellResult
from medsilo.plan import Plan
from medsilo_lab.study.cells import Row
from medsilo_lab.study.verdict_file import PairedDifference, Verdict

MOST_SITES = 8  # with a column each
NAMES = ("mean over sites", "pooled over cases", "worst site")


def table(plan: Plan, found: dict[Row, dict[int, CellResult]]) -> list[str]:
    """Per row: the sites' mean test score and its spread over seeds, the worst site, how soon, at what price."""
    sites = sorted({site for own in found.values() for result in own.values() for site in result.sites})
    sites = sites if len(sites) <= MOST_SITES else []
    average = next((own for row, own in found.items() if "algorithm.name=fedavg" in row.changes), {})
    folds = plan.task.fold.of if plan.task.fold else None
    heads = ["row", "mean over sites", "lowest, highest seed", "worst site", *sites]
    heads += ["rounds to FedAvg's end", "seconds a seed" if folds else "seconds a run", "MB up, a site and round"]
    lines = [
        f"Test {plan.task.goal.metric} in %, mean ± standard deviation over seeds. Task `{plan.task.name}`, network "
        f"`{plan.network.name}`, norm `{getattr(plan.network, 'norm', 'none')}` unless the row says otherwise.",
        *([f"Patients take turns in the test part: {folds} folds, the runs of a seed."] if folds else []),
        "",
        *_lines(heads),
    ]
    for row, own in found.items():
        results = list(own.values())
        means = [100 * score for score in _known(result.test for result in results)]
        soon = [rounds_to(average[seed].validation[-1], result) for seed, result in own.items() if seed in average]
        seconds = _known(result.seconds for result in results)
        sent = _known(result.bytes_up for result in results)
        values = [
            row.title,
            _spread(means),
            f"{min(means):.1f}, {max(means):.1f}" if means else "–",
            _spread([100 * min(scores) for result in results if (scores := _known(result.sites.values()))]),
            *(_spread([100 * score for score in _known(one.sites.get(site) for one in results)]) for site in sites),
            ", ".join("never" if number is None else str(number) for number in soon) or "–",
            f"{statistics.mean(seconds):.0f}" if seconds else "–",
            f"{statistics.mean(sent) / 1e6:.3g}" if sent else "–",
        ]
        lines.append(f"| {' | '.join(values)} |")
    return lines


def sure(verdict: Verdict) -> list[str]:
    """Differences with their intervals: from the row that all are held against, and from what each site has alone."""
    sites = verdict.sites if len(verdict.sites) <= MOST_SITES else []
    lines = []
    held = [row for row in verdict.rows if row.against]
    if held:
        lines += [
            f"## Against {verdict.against}",
            "",
            f"Difference in points, paired by test case, with its 95 % interval for {verdict.holds_for}; p after "
            "Holm's correction for all rows. "
            "**Bold**: the interval leaves zero out, and so does the corrected test. "
            f"The question that was declared before is the {NAMES[0]}; all else is exploratory.",
            "",
            *_lines(["row", *(text for name in NAMES for text in (name, "p")), *sites]),
        ]
        for row in held:
            found = (row.difference.mean, row.difference.pooled, row.difference.worst)
            cells = [text for one in found for text in (difference(one), _p(one))]
            cells += [difference(row.difference.sites[site]) for site in sites]
            lines.append(f"| {' | '.join([row.title, *cells])} |")
        lines += ["", *(f"* **{row.title}**, against {row.against}: {row.unlike}." for row in held if row.unlike)]
        lines += [verdict.could_have_seen.words, ""] if verdict.could_have_seen else [""]
    joined = [row for row in verdict.rows if any(row.joining.values())]
    if joined and sites:
        lines += [
            "## Does joining pay?",
            "",
            "Every site: the method's model minus the site's own with the same norm, in points, with the interval; "
            "Holm's correction for all methods and all sites together.",
            "",
            *_lines(["row", *sites]),
            *(f"| {' | '.join([row.title, *(difference(row.joining[site]) for site in sites)])} |" for row in joined),
            f"| **does it?** | {' | '.join(pays(verdict, site) for site in sites)} |",
            "",
        ]
    return lines


def pays(verdict: Verdict, site: str) -> str:
    """Return whether joining pays for a site, by the declared federation, or by any where none is declared."""
    rows = [row for row in verdict.rows if verdict.declared in (None, row.title)]
    found = [one for row in rows if (one := row.joining.get(site))]
    if not found:
        return "unknown"
    if any(one.sure and one.mean > 0 for one in found):
        return "yes"
    return "no" if all(one.sure and one.mean < 0 for one in found) else "open"


def _lines(heads: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]


def difference(found: PairedDifference | None) -> str:
    """Return a difference in points with its interval, bold where it is sure."""
    if found is None:
        return "–"
    text = f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})".replace("-", "−")
    return f"**{text}**" if found.sure else text


def _p(found: PairedDifference | None) -> str:
    return "–" if found is None else "< 0.001" if found.adjusted < 0.001 else f"{found.adjusted:.3f}"


def rounds_to(level: float | None, result: CellResult) -> int | None:
    """The training rounds after which the mean validation score first was this high."""
    if level is None:
        return None
    reached = (number for number, value in enumerate(result.validation) if value is not None and value >= level)
    first = next(reached, None)
    return None if first is None else max(first - result.measuring, 0)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
