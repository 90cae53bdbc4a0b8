"""The sites' cases by part and by class: how many, and how common each class is there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.report.formats import cell
from medsilo.report.pictures import Dot, dot_chart, dot_ticks
from medsilo.report.read import RunResult
from medsilo.runs.schema import FilesFound, Pair

PARTS = ("train", "validation", "test")
Table = tuple[str, Sequence[str], list[tuple[str, list[dict[str, Any]]]]]  # its title, its heads, its rows


@dataclass(frozen=True)
class Holding:
    """The cases of one run's sites, by part, and of the training part by class where a site tells them."""

    sites: tuple[str, ...]
    parts: tuple[tuple[int | None, ...], ...]
    classes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, run: RunResult) -> "Holding":
        told = [run.site(site) for site in run.sites]
        counts = [(site.classes or {}).get("train") for site in told]
        return cls(
            tuple(run.sites),
            tuple(tuple((site.cases or {}).get(part) for part in PARTS) for site in told),
            tuple(None if one is None else tuple(one) for one in counts),
        )

    def tables(self) -> Iterator[Table]:
        """Yield the cases by part, and by class; the darker a cell, the larger its share of the site's."""
        yield "Cases by part", PARTS, self._rows(self.parts, 0)
        if widest := max((len(counts) for counts in self.classes if counts), default=0):
            rows = [counts or (None,) * widest for counts in self.classes]
            yield "Training cases by class", [str(label) for label in range(widest)], self._rows(rows, 1)

    def _rows(self, rows: Sequence[Sequence[int | None]], shaded: float) -> list[tuple[str, list[dict[str, Any]]]]:
        told = []
        for site, counts in zip(self.sites, rows, strict=True):
            whole = sum(filter(None, counts)) or 1
            shares = [(count or 0) / whole for count in counts]
            texts = ["–" if count is None else str(count) for count in counts]
            asides = [f"{share:.0%}" if shaded and count else "" for count, share in zip(counts, shares, strict=True)]
            cells = [cell(*one, "heat") for one in zip(counts, texts, asides, strict=True)]
            told.append((site, [one | {"heat": shaded * share} for one, share in zip(cells, shares, strict=True)]))
        return told


def tables(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """One entry for all runs whose sites have the same: which runs, and its tables."""
    groups: dict[Holding, list[str]] = {}
    for run in runs:
        groups.setdefault(Holding.of(run), []).append(run.label)
    return [
        {"label": ", ".join(labels) if len(groups) > 1 else "", "tables": list(holding.tables())}
        for holding, labels in groups.items()
        if any(count for counts in holding.parts for count in counts)
    ]


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
        chart = dot_chart(dots, dot_ticks([dots], []), key=f"shift-{number}", title=f"{name} at every site")
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
