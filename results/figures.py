"""Collect the results of a comparison's runs by row and seed, for the first tables of a page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from medsilo_lab.study.cells import Cell, Row
from medsilo_server.record import Record


@dataclass(frozen=True)
class CellResult:
    test: float | None = None  # mean test score over sites
    pooled: float | None = None
    sites: dict[str, float | None] = field(default_factory=dict)
    validation: list[float | None] = field(default_factory=list)  # mean over sites after 0, 1, 2, … rounds
    measuring: int = 0  # number of rounds without training at the beginning of a run
    seconds: float | None = None
    bytes_up: float | None = None  # bytes that a site sent in a round, on average


def results_of(cells: Sequence[Cell], row: Row) -> dict[int, CellResult]:
    found = {}
    for seed in dict.fromkeys(cell.seed for cell in cells):
        results = [result_of(cell) for cell in cells if cell.row == row and cell.seed == seed]
        finished = [result for result in results if result]
        if finished and len(finished) == len(results):
            found[seed] = over_folds(finished)
    return found


def over_folds(results: Sequence[CellResult]) -> CellResult:
    """Combine the results of the folds of one seed into one result: the mean of the scores, and the sum of the
    times.
    """
    if len(results) == 1:
        return results[0]
    curves = zip(*(result.validation for result in results), strict=False)
    return replace(
        results[0],
        test=_mean(result.test for result in results),
        pooled=_mean(result.pooled for result in results),
        sites={site: _mean(result.sites.get(site) for result in results) for site in results[0].sites},
        validation=[_mean(column) for column in curves],
        seconds=sum(result.seconds or 0 for result in results),
        bytes_up=_mean(result.bytes_up for result in results),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def result_of(cell: Cell) -> CellResult | None:
    summary = cell.summary()
    if summary is None:
        return None
    lines, sites = Record(cell.folder).rounds(), summary.sites.values()
    trained = [line for line in lines if any(site.train_loss is not None for site in line.sites.values())]
    columns = zip(*(site.validation for site in sites), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    contributed = sum(site.contributed or 0 for site in sites)
    return CellResult(
        test=summary.mean_test,
        pooled=summary.pooled_test,
        sites={site: summary.score(site) for site in summary.sites},
        validation=[sum(values) / len(values) if values else None for values in known],
        measuring=len(lines) - len(trained),
        seconds=summary.seconds,
        bytes_up=sum(site.bytes_up or 0 for site in sites) / max(contributed, 1),
    )
