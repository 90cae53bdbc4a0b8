"""Dots with whiskers, as inline SVG like the line charts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.report.charts import colour, draw_text, marker, start_svg, ticks, to_markup

ROW, HEAD, FOOT = 18, 4, 26  # of a chart of dots
DOTS_WIDTH, DOT_NAMES, DOTS_RIGHT = 380, 132, 14


@dataclass(frozen=True)
class Dot:
    """A score with its interval, as a dot on a whisker."""

    name: str
    value: float | None
    style: int = 0
    interval: tuple[float, float] | None = None

    @property
    def words(self) -> str:
        """The score and its interval."""
        interval = f" ({self.interval[0]:.3f} to {self.interval[1]:.3f})" if self.interval else ""
        return f"{self.name} {_number(self.value)}{interval}"


def dot_ticks(charts: Sequence[Sequence[Dot]], chances: Sequence[float | None]) -> list[float]:
    """Return the marks of an axis that all charts share; it need not begin at 0, as dots have no length."""
    dots = [dot for chart in charts for dot in chart if dot.value is not None]
    edges = [edge for dot in dots for edge in (dot.value, *(dot.interval or ()))]
    known = [value for value in (*edges, *chances) if value is not None]
    return ticks(min(known), max(known))


def dot_chart(
    dots: Sequence[Dot], marks: Sequence[float], *, key: str, title: str, chance: float | None = None
) -> Markup:
    """One row per score, with its name on the left. `chance` is a broken line: what guessing reaches."""
    height = HEAD + ROW * len(dots) + FOOT
    words = [f"{dot.words}." for dot in dots]
    if chance is not None:
        words.append(f"Guessing reaches {chance:.3f}.")
    svg = start_svg(DOTS_WIDTH, height, key, title, " ".join(words), small=True)
    scale = (DOTS_WIDTH - DOT_NAMES - DOTS_RIGHT) / (marks[-1] - marks[0])

    def place(value: float) -> float:
        return round(DOT_NAMES + (value - marks[0]) * scale, 1)

    for mark in marks:
        ElementTree.SubElement(svg, "path", {"class": "gridline", "d": f"M{place(mark)} 0V{height - FOOT}"})
        draw_text(svg, f"{mark:g}", x=place(mark), y=height - FOOT + 16, **{"text-anchor": "middle"})
    if chance is not None:
        ElementTree.SubElement(svg, "path", {"class": "chance", "d": f"M{place(chance)} 0V{height - FOOT}"})
    for row, dot in enumerate(dots):
        middle = HEAD + ROW * row + ROW / 2
        draw_text(svg, shortened(dot.name, most=22), x=DOT_NAMES - 8, y=middle + 4, **{"text-anchor": "end"})
        if dot.value is None:
            continue
        group = ElementTree.SubElement(svg, "g", {"class": colour(dot.style)})
        draw_text(group, dot.words, "title")
        if dot.interval:
            low, high = map(place, dot.interval)
            ElementTree.SubElement(group, "path", {"class": "whisker", "d": f"M{low} {middle}H{high}"})
        ElementTree.SubElement(group, "path", {"class": "mark", "d": marker(dot.style, place(dot.value), middle)})
    return to_markup(svg)


def matrix_strip(told: Sequence[tuple[str, Sequence[Sequence[float]]]], sites: Sequence[str], key: str) -> Markup:
    """Draw matrices beside each other: the darker a cell, the larger its number. What a site keeps is only framed."""
    size = max(4, min(14, 112 // len(sites)))
    wide, most = size * len(sites), max((row[j] for _, rows in told for row, j in _others(rows)), default=0) or 1
    words = " ".join(f"{caption}: {_strongest(rows, sites)}" for caption, rows in told)
    svg = start_svg(len(told) * (wide + 24), wide + 22, key, "Who learned from whom, by round", words, small=True)
    for place, (caption, rows) in enumerate(told):
        left = place * (wide + 24) + 12
        draw_text(svg, caption, x=left + wide / 2, y=12, **{"text-anchor": "middle"})
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                shade = (
                    {"class": "gridline", "fill": "none"}
                    if i == j
                    else {"class": "worked", "fill-opacity": f"{value / most:.2f}"}
                )
                area = f"M{left + j * size} {20 + i * size}h{size - 1}v{size - 1}h{1 - size}z"
                cell = ElementTree.SubElement(svg, "path", shade | {"d": area})
                draw_text(cell, f"{caption}: {sites[i]} takes {value:.2f} of {sites[j]}", "title")
    return to_markup(svg)


def _others(rows: Sequence[Sequence[float]]) -> Iterator[tuple[Sequence[float], int]]:
    """Yield each row with the place of each other site."""
    return ((row, j) for i, row in enumerate(rows) for j in range(len(row)) if i != j)


def _strongest(rows: Sequence[Sequence[float]], sites: Sequence[str]) -> str:
    value, i, j = max((value, i, j) for i, row in enumerate(rows) for j, value in enumerate(row) if i != j)
    return f"most, {value:.2f}, goes from {sites[j]} to {sites[i]}."


def shortened(name: str, most: int = 14) -> str:
    """A name in the room that there is."""
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"


def _number(value: float | None) -> str:
    return "no value" if value is None else f"{value:.3f}"
