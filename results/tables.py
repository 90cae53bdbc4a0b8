"""Present a comparison as tables of a file: the methods' scores, and the differences between methods with intervals."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from medsilo.plan import Plan
from medsilo_lab.study.cells import Row
from medsilo_lab.study.verdict_file import PairedDifference, Verdict
from results.figures import CellResult
from results.result_files import MEAN, Table

NAMES = (MEAN, "pooled over cases", "worst site")
ALONE = "single-site, same normalisation layer"


def scores(part: str, plan: Plan, found: dict[Row, dict[int, CellResult]], verdict: Verdict) -> Table:
    """For each row, return the mean test score over sites, the score's spread over seeds, the worst site, the best
    round, and the cost.
    """
    sites = sorted({site for own in found.values() for result in own.values() for site in result.sites})
    average = next((own for row, own in found.items() if "algorithm.name=fedavg" in row.changes), {})
    heads = ["configuration", MEAN, "lowest, highest seed", "worst site", *sites]
    heads += ["rounds to FedAvg's end", f"seconds a {'seed' if plan.task.fold else 'run'}", "MB up, a site and round"]
    rows = []
    for row, own in found.items():
        results = list(own.values())
        means = [100 * score for score in _known(result.test for result in results)]
        soon = [rounds_to(average[seed].validation[-1], result) for seed, result in own.items() if seed in average]
        seconds = _known(result.seconds for result in results)
        sent = _known(result.bytes_up for result in results)
        rows.append(
            [
                row.title,
                _spread(means),
                f"{min(means):.1f}, {max(means):.1f}" if means else "",
                _spread([100 * min(own) for result in results if (own := _known(result.sites.values()))]),
                *(_spread([100 * score for score in _known(one.sites.get(site) for one in results)]) for site in sites),
                ", ".join("never" if number is None else str(number) for number in soon),
                f"{statistics.mean(seconds):.0f}" if seconds else "",
                f"{statistics.mean(sent) / 1e6:.3g}" if sent else "",
            ]
        )
    return Table(heads, rows, part, seeds=_seeds(verdict), patients=_patients(verdict))


def differences(part: str, verdict: Verdict, with_sites: bool = True) -> Iterator[Table]:
    sites = verdict.sites if with_sites else []
    own = {"seeds": _seeds(verdict), "patients": _patients(verdict)}
    rows = []
    for row in (row for row in verdict.rows if row.baseline):
        found = (row.difference.mean, row.difference.pooled, row.difference.worst)
        cells = [text for one in found for text in (difference(one), p_of(one))]
        rows.append([row.title, *cells, *(difference(row.difference.sites[site]) for site in sites)])
    yield Table(
        ["", *(head for name in NAMES for head in (name, "p")), *sites], rows, part, verdict.baseline or "", **own
    )
    joined = [row for row in verdict.rows if any(row.from_single_site.values())]
    if joined and with_sites:
        told = [[row.title, *(difference(row.from_single_site[site]) for site in sites)] for row in joined]
        told.append(["does federated training help?", *(helps(verdict, site) for site in sites)])
        yield Table(["", *sites], told, part, ALONE, **own)


def helps(verdict: Verdict, site: str) -> str:
    """Say if a site benefits from the declared federation, or from any federation if none is declared: yes, no,
    inconclusive or unknown.
    """
    rows = [row for row in verdict.rows if verdict.declared in (None, row.title)]
    found = [one for row in rows if (one := row.from_single_site.get(site))]
    if not found:
        return "unknown"
    if any(one.sure and one.mean > 0 for one in found):
        return "yes"
    return "no" if all(one.sure and one.mean < 0 for one in found) else "inconclusive"


def _seeds(verdict: Verdict) -> str:
    return str(max((len(row.seeds) for row in verdict.rows), default=0))


def _patients(verdict: Verdict) -> dict[str, int]:
    known = verdict.patients
    return {**known, **dict.fromkeys(NAMES[:2], sum(known.values()))} if known else {}


def points(mean: float, low: float, high: float, significant: bool) -> str:
    """Return a difference in points with its interval, written in bold if the difference is significant."""
    text = f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    return f"**{text}**" if significant else text


def difference(found: PairedDifference | None) -> str:
    return points(found.mean, found.low, found.high, found.sure) if found else ""


def p_of(found: PairedDifference | None) -> str:
    return "" if found is None else f"{found.adjusted:.3g}"


def rounds_to(level: float | None, result: CellResult) -> int | None:
    """Return the number of training rounds after which the mean validation score first reached the value `level`."""
    if level is None:
        return None
    reached = (number for number, value in enumerate(result.validation) if value is not None and value >= level)
    first = next(reached, None)
    return None if first is None else max(first - result.measuring, 0)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
