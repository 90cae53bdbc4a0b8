"""The sites' cases by class, as the papers draw them: a dot for each class and site, its area the number of cases."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.report.pictures import NAMES, draw_text, shortened, start_svg, to_markup
from medsilo.report.read import RunResult

PARTS = ("train", "validation", "test")
CELL, WIDEST, HEAD, FOOT = 34, 640, 22, 4
MOST_NUMBERS = 12  # columns up to which a number stands below each dot


@dataclass(frozen=True)
class Holding:
    """The cases of one run's sites, by part, and of the training part by class where a site tells them."""

    sites: tuple[str, ...]
    parts: tuple[tuple[int | None, ...], ...]
    classes: tuple[tuple[int, ...] | None, ...]
    unknown: str = "–"  # in place of a number that is not told

    @classmethod
    def of(cls, run: RunResult) -> "Holding":
        told = [run.site(site) for site in run.sites]
        counts = [(site.classes or {}).get("train") for site in told]
        return cls(
            tuple(run.sites),
            tuple(tuple((site.cases or {}).get(part) for part in PARTS) for site in told),
            tuple(None if one is None else tuple(one) for one in counts),
            "sealed" if any(site.cases and site.cases.get("train") is None for site in told) else "–",
        )


def pictures(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """One entry for all runs whose sites have the same: which runs, and its pictures."""
    groups: dict[Holding, list[str]] = {}
    for run in runs:
        groups.setdefault(Holding.of(run), []).append(run.label)
    return [
        {"label": ", ".join(labels) if len(groups) > 1 else "", "charts": _charts(holding, f"who-{place}")}
        for place, (holding, labels) in enumerate(groups.items())
        if any(count for counts in holding.parts for count in counts)
    ]


def _charts(holding: Holding, key: str) -> list[dict[str, Any]]:
    charts: list[tuple[str, Sequence[str], Sequence[Sequence[int | None]]]] = [("Cases by part", PARTS, holding.parts)]
    widest = max((len(counts) for counts in holding.classes if counts), default=0)
    if widest:
        rows = tuple(counts or (None,) * widest for counts in holding.classes)
        charts.append(("Training cases by class", tuple(str(label) for label in range(widest)), rows))
    return [
        {
            "title": title,
            "chart": dots(holding.sites, columns, rows, key=f"{key}-{place}", title=title, unknown=holding.unknown),
        }
        for place, (title, columns, rows) in enumerate(charts)
    ]


def dots(
    sites: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[int | None]],
    *,
    key: str,
    title: str,
    unknown: str = "–",
) -> Markup:
    """Row i, column j: what site i has of j. None is not told and leaves a dash, or why; 0 leaves nothing."""
    cell = min(CELL, (WIDEST - NAMES) / len(columns)) if len(columns) > MOST_NUMBERS else CELL * 1.6
    tall = CELL + (12 if len(columns) <= MOST_NUMBERS else 0)
    width, height = NAMES + len(columns) * cell, HEAD + len(sites) * tall + FOOT
    svg = start_svg(width, height, key, title, _words(sites, columns, rows, unknown))
    most = max((count for row in rows for count in row if count), default=1)
    for j, column in enumerate(columns):
        draw_text(svg, column, x=round(NAMES + (j + 0.5) * cell, 1), y=HEAD - 8, **{"text-anchor": "middle"})
    for i, site in enumerate(sites):
        middle = HEAD + i * tall + CELL / 2
        draw_text(svg, shortened(site), x=NAMES - 6, y=middle + 4, **{"text-anchor": "end"})
        for j, (column, count) in enumerate(zip(columns, rows[i], strict=True)):
            x = round(NAMES + (j + 0.5) * cell, 1)
            if count:
                dot = ElementTree.SubElement(svg, "g", {"class": f"s{i % 8}"})
                draw_text(dot, f"{site}, {column}: {count}", "title")
                radius = (min(cell, CELL) / 2 - 1) * sqrt(count / most)
                place = {"cx": str(x), "cy": str(middle), "r": f"{max(radius, 0.7):.2f}"}
                ElementTree.SubElement(dot, "circle", place | {"class": "dot"})
            if len(columns) <= MOST_NUMBERS or count is None:
                shown = unknown if count is None else str(count)
                y = middle + (CELL / 2 + 9 if len(columns) <= MOST_NUMBERS else 4)
                draw_text(svg, shown, x=x, y=y, **{"text-anchor": "middle"})
    return to_markup(svg)


def _words(sites: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[int | None]], unknown: str) -> str:
    instead = "not told" if unknown == "–" else unknown
    return " ".join(
        f"{site}: "
        + ", ".join(f"{column} {instead if n is None else n}" for column, n in zip(columns, row, strict=True))
        + "."
        for site, row in zip(sites, rows, strict=True)
    )
