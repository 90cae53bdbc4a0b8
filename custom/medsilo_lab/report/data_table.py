"""The sites' cases by part and by class, and how their data differ: files that are here, and what was disclosed."""

from collections.abc import Iterator, Sequence
from typing import Any

from medsilo.runs.site_files import FilesFound, Pair
from medsilo_lab.report.charts import Dot, dot_chart
from medsilo_lab.report.formats import cell
from medsilo_lab.report.read import RunResult

PARTS = ("train", "validation", "test")
Table = tuple[str, Sequence[str], list[tuple[str, list[dict[str, Any]]]]]  # its title, its heads, its rows


def tables(runs: Sequence[RunResult]) -> Iterator[Table]:
    """Yield the cases by part, and those of the training part by class where a site tells them, of the run with most
    sites."""
    run = max(runs, key=lambda run: len(run.sites), default=None)
    if run is None or not any(run.site(site).cases for site in run.sites):
        return
    told, unit = [run.site(site) for site in run.sites], "slices" if run.summary.sliced else "cases"
    parts = [[(site.cases or {}).get(part) for part in PARTS] for site in told]
    yield f"{unit.capitalize()} by part", PARTS, _rows(run.sites, parts, 0)
    classes = [(site.classes or {}).get("train") for site in told]
    if widest := max((len(counts) for counts in classes if counts), default=0):
        rows: list[Sequence[int | None]] = [counts or [None] * widest for counts in classes]
        yield f"Training {unit} by class", [str(label) for label in range(widest)], _rows(run.sites, rows, 1)


def _rows(
    sites: Sequence[str], rows: Sequence[Sequence[int | None]], shaded: float, unknown: str = "–"
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return counts as cells, the darker, the larger their share of the site's."""
    told = []
    for site, counts in zip(sites, rows, strict=True):
        whole = sum(filter(None, counts)) or 1
        shares = [(count or 0) / whole for count in counts]
        texts = [unknown if count is None else str(count) for count in counts]
        asides = [f"{share:.0%}" if shaded and count else "" for count, share in zip(counts, shares, strict=True)]
        cells = [cell(*one, "heat") for one in zip(counts, texts, asides, strict=True)]
        told.append((site, [one | {"heat": shaded * share} for one, share in zip(cells, shares, strict=True)]))
    return told


# ---------------------------------------------------------------------------------------------------- what differs
def shifts(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return a chart of each quantity that differs between hospitals' files, where two hospitals' folders are here."""
    files = next((run.files for run in runs if len(run.files) > 1), {})
    told = {site: dict(_quantities(one)) for site, one in files.items()}
    charts = []
    for number, name in enumerate(dict.fromkeys(name for own in told.values() for name in own)):
        ranges = {site: own[name] for site, own in told.items() if name in own}
        if len(set(ranges.values())) < 2:
            continue
        dots = [Dot(site, (low + high) / 2, n, (low, high)) for n, (site, (low, high)) in enumerate(ranges.items())]
        chart = dot_chart(dots, key=f"shift-{number}", title=f"{name} at every site")
        charts.append({"title": name, "chart": chart})
    return charts


def _quantities(files: FilesFound) -> Iterator[tuple[str, Pair]]:
    for what, ranges in (("Size {}, voxels", files.size), ("Spacing {}, mm", files.spacing)):
        yield from ((what.format(axis), pair) for axis, pair in zip("xyz", ranges or (), strict=False))
    for what, pair in (("Intensity", files.intensity), ("Seconds", files.seconds)):
        if pair:
            yield what, pair
    for name, (mean, deviation) in files.scales.items():
        yield f"{name}, mean ± standard deviation", (mean - deviation, mean + deviation)
