"""Dots with whiskers, as inline SVG like the line charts."""

from collections.abc import Sequence
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


def shortened(name: str, most: int = 14) -> str:
    """A name in the room that there is."""
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"


def _number(value: float | None) -> str:
    return "no value" if value is None else f"{value:.3f}"
