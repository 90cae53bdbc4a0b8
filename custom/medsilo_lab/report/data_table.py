"""Tables of the numbers of cases that each site discloses: for training, validation and test, and for each class."""

from collections.abc import Iterator, Sequence
from typing import Any

from medsilo.core.text import counted
from medsilo_lab.report.formats import cell
from medsilo_lab.report.read import RunResult

PARTS = ("train", "validation", "test")
Rows = list[tuple[str, list[dict[str, Any]]]]
Table = tuple[str, Sequence[str], Rows, str]


def tables(runs: Sequence[RunResult]) -> Iterator[Table]:
    """Yield two tables about a single run: of the given runs, the run with the most sites. One table has the numbers of
    cases in training, validation and test; the other has the training cases of each class. If no site discloses numbers
    of cases of each class, the table about classes is omitted.
    """
    run = max(runs, key=lambda run: len(run.sites), default=None)
    if run is None or not any(run.site(site).cases for site in run.sites):
        return
    told, unit = [run.site(site) for site in run.sites], "slices" if run.summary.sliced else "cases"
    parts = [[(site.cases or {}).get(part) for part in PARTS] for site in told]
    yield f"{unit.capitalize()} by part", PARTS, _rows(run.sites, parts, 0), _sample(parts, unit)
    classes = [(site.classes or {}).get("train") for site in told]
    if widest := max((len(counts) for counts in classes if counts), default=0):
        rows: list[Sequence[int | None]] = [counts or [None] * widest for counts in classes]
        yield f"Training {unit} by class", run.class_names(widest), _rows(run.sites, rows, 1), _sample(rows, unit)


def _sample(rows: Sequence[Sequence[int | None]], unit: str) -> str:
    return f"n = {sum(count or 0 for row in rows for count in row)} {unit} at {counted(len(rows), 'site')}"


def _rows(
    sites: Sequence[str], rows: Sequence[Sequence[int | None]], shaded: float
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return counts as table cells. A cell is darker if its count is a larger fraction of the site's cases."""
    told = []
    for site, counts in zip(sites, rows, strict=True):
        whole = sum(filter(None, counts)) or 1
        shares = [(count or 0) / whole for count in counts]
        texts = ["–" if count is None else str(count) for count in counts]
        asides = [f"{share:.0%}" if shaded and count else "" for count, share in zip(counts, shares, strict=True)]
        cells = [cell(*one, "heat") for one in zip(counts, texts, asides, strict=True)]
        told.append((site, [one | {"heat": shaded * share} for one, share in zip(cells, shares, strict=True)]))
    return told
