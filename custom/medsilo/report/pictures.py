"""The heat map of who learns from whom, and bars per site and method, as inline SVG like the line charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.core.text import printable
from medsilo.report.charts import COLOURS, ticks

CELL, NAMES = 30, 92  # of the heat map: a cell's side, the room for the sites' names
MOST_NUMBERS = 14  # sites up to which each cell shows its number
BAR, GAP, RIGHT, HEAD, FOOT = 8, 12, 44, 4, 34
WIDTH = 620


@dataclass(frozen=True)
class Bars:
    """One method: `values[n]` is its score at the n-th site; None leaves a gap. `intervals` are drawn over the bars."""

    name: str
    values: Sequence[float | None]
    style: int = 0
    intervals: Sequence[tuple[float, float] | None] = ()

    def interval(self, n: int) -> tuple[float, float] | None:
        """That of the n-th site."""
        return self.intervals[n] if self.intervals else None

    def words(self, n: int) -> str:
        """The score and its interval at the n-th site."""
        interval = self.interval(n)
        return _number(self.values[n]) + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def heat_map(sites: Sequence[str], weights: Sequence[Sequence[float]], *, key: str, title: str) -> Markup:
    """Row i, column j: how much site j's model counts in site i's mixture. The diagonal only has a frame."""
    count = len(sites)
    side = NAMES + count * CELL
    svg = start_svg(side, side, key, title, _describe(sites, weights))
    others = [value for i, row in enumerate(weights) for j, value in enumerate(row) if i != j]
    most = max(others, default=0.0) or 1.0
    for i, site in enumerate(sites):
        middle = NAMES + i * CELL + CELL / 2
        draw_text(svg, shortened(site), x=NAMES - 6, y=middle + 4, **{"text-anchor": "end"})
        draw_text(svg, shortened(site), x=middle + 4, y=NAMES - 6, transform=f"rotate(-90 {middle + 4} {NAMES - 6})")
        for j, value in enumerate(weights[i]):
            x, y = NAMES + j * CELL, NAMES + i * CELL
            cell = ElementTree.SubElement(svg, "g")
            draw_text(cell, f"{site} takes {value:.3f} from {sites[j]}", "title")
            strength = 0.0 if i == j else value / most
            shape = {"x": str(x + 1), "y": str(y + 1), "width": str(CELL - 2), "height": str(CELL - 2)}
            look = {"class": "heat own" if i == j else "heat", "fill-opacity": f"{strength:.3f}"}
            ElementTree.SubElement(cell, "rect", shape | look)
            if count <= MOST_NUMBERS:
                bright = {"class": "on"} if strength > 0.55 else {}
                number = f"{value:.2f}".removeprefix("0")
                draw_text(cell, number, x=x + CELL / 2, y=y + CELL / 2 + 4, **{"text-anchor": "middle"}, **bright)
    return to_markup(svg)


def site_bars(sites: Sequence[str], methods: Sequence[Bars], *, key: str, title: str) -> Markup:
    """For every site one bar per method, in the methods' order; the number stands at its end."""
    group = BAR * len(methods) + GAP
    height = HEAD + group * len(sites) + FOOT
    known = [value for one in methods for value in one.values if value is not None]
    ends = [interval[1] for one in methods for interval in one.intervals if interval]
    marks = ticks(0.0, max([1e-9, *known, *ends]))
    words = [
        f"{site}: " + ", ".join(f"{one.name} {one.words(n)}" for one in methods) + "." for n, site in enumerate(sites)
    ]
    svg = start_svg(WIDTH, height, key, title, " ".join(words))
    scale = (WIDTH - NAMES - RIGHT) / marks[-1]
    for mark in marks:
        x = NAMES + mark * scale
        ElementTree.SubElement(svg, "path", {"class": "gridline", "d": f"M{x:.1f} 0V{height - FOOT}"})
        draw_text(svg, f"{mark:g}", x=round(x, 1), y=height - FOOT + 16, **{"text-anchor": "middle"})
    for n, site in enumerate(sites):
        top = HEAD + n * group
        draw_text(svg, shortened(site), x=NAMES - 6, y=top + (group - GAP) / 2 + 4, **{"text-anchor": "end"})
        for place, one in enumerate(methods):
            value = one.values[n]
            if value is None:
                continue
            bar = ElementTree.SubElement(svg, "g", {"class": f"s{one.style % COLOURS}"})
            draw_text(bar, f"{site}, {one.name}: {one.words(n)}", "title")
            size = {"x": str(NAMES), "y": str(top + place * BAR), "height": str(BAR - 1)}
            ElementTree.SubElement(bar, "rect", size | {"class": "bar", "width": f"{max(value * scale, 0.5):.1f}"})
            if interval := one.interval(n):
                low, high = (NAMES + edge * scale for edge in interval)
                middle = top + place * BAR + (BAR - 1) / 2
                whisker = f"M{low:.1f} {middle - 2}v4m0 -2H{high:.1f}m0 -2v4"
                ElementTree.SubElement(bar, "path", {"class": "whisker", "d": whisker})
            elif len(methods) <= 4:
                draw_text(bar, f"{value:.3f}", x=round(NAMES + value * scale + 4, 1), y=top + place * BAR + BAR - 1)
    return to_markup(svg)


def _describe(sites: Sequence[str], weights: Sequence[Sequence[float]]) -> str:
    """The heat map in words: from whom each site takes most."""
    sentences = []
    for i, site in enumerate(sites):
        others = [(value, sites[j]) for j, value in enumerate(weights[i]) if j != i]
        most = f", most of the others from {max(others)[1]} ({max(others)[0]:.2f})" if others else ""
        sentences.append(f"{site} keeps {weights[i][i]:.2f} of its own{most}.")
    return " ".join(sentences)


def start_svg(width: float, height: float, key: str, title: str, description: str) -> ElementTree.Element:
    """A drawing with a title and a description in words."""
    labels = {"role": "img", "aria-labelledby": f"{key}-title", "aria-describedby": f"{key}-description"}
    box = {"class": "chart picture", "viewBox": f"0 0 {width:g} {height:g}"}
    svg = ElementTree.Element("svg", box | labels | {"style": f"max-width:{width:g}px"})
    draw_text(svg, title, "title", id=f"{key}-title")
    draw_text(svg, description, "desc", id=f"{key}-description")
    return svg


def draw_text(parent: ElementTree.Element, text: str, tag: str = "text", **attributes: str | float) -> None:
    """A text, or a title; ElementTree escapes it."""
    element = ElementTree.SubElement(parent, tag, {name: str(value) for name, value in attributes.items()})
    element.text = printable(text)


def shortened(site: str) -> str:
    """A site's name in the room that there is."""
    return site if len(site) <= 14 else f"{site[:6]}…{site[-7:]}"


def _number(value: float | None) -> str:
    return "no value" if value is None else f"{value:.3f}"


def to_markup(svg: ElementTree.Element) -> Markup:
    """The drawing for the page."""
    return Markup(ElementTree.tostring(svg, encoding="unicode", short_empty_elements=False))
