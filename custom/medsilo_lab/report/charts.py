"""Line charts and differences as inline SVG: no library, no script, readable without colour or by a screen reader.

Colours come from the page (CSS classes `s0` to `s7`, and `r0`, `r1` for what federations are held against), so one
drawing serves light, dark and print. Each series also has its own dash pattern and marker, because colour alone is lost
on paper and to one reader in twelve.
By hand for a reason: drawing libraries write neither classes for the page's colours nor texts for screen readers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.core.text import printable

WIDTH, HEIGHT = 350, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 42
COLOURS = 8  # told apart by a colour-blind reader, and from the two inks of references
INKS = 2
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4")  # five dashes and seven markers: no pair repeats with eight colours
MARKERS = (
    "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",  # circle
    "m-3.2 -3.2h6.4v6.4h-6.4z",  # square
    "m0 -4.4l4.2 7.4h-8.4z",  # triangle
    "m0 -4.8l4.2 4.8l-4.2 4.8l-4.2 -4.8z",  # diamond
    "m0 4.4l4.2 -7.4h-8.4z",  # wedge
    "m-1.6 -5h3.2v10h-3.2z",  # bar
    "m-1.4 -4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3z",  # cross
)
ROW, FOOT, AXIS, EDGE = 22, 26, 288, 16  # of a chart of a difference
MOST_MARKERS = 120  # on one chart, so that many long lines do not turn into a cloud


@dataclass(frozen=True)
class Series:
    """One line: `values[n]` at `places[n]`, by default at n; it goes on over None. `ring` circles the point at that n;
    `band` shades from the first to the second of each pair."""

    name: str
    values: Sequence[float | None]
    style: int = 0
    ring: int | None = None
    places: Sequence[float] | None = None
    band: Sequence[tuple[float, float] | None] = ()

    def place(self, n: int) -> float:
        """Return where the n-th value lies on the x axis."""
        return n if self.places is None else self.places[n]


@dataclass(frozen=True)
class Drawing:
    """An SVG element, and what is drawn into it."""

    element: ElementTree.Element

    @classmethod
    def start(cls, width: float, height: float, key: str, title: str, description: str, small: bool = False) -> Self:
        """A drawing, with a title and a description in words. small: no wider than it was drawn, in smaller letters."""
        labels = {"role": "img", "aria-labelledby": f"{key}-title", "aria-describedby": f"{key}-description"}
        look = {"class": "chart picture", "style": f"max-width:{width:g}px"} if small else {"class": "chart"}
        svg = cls(ElementTree.Element("svg", look | labels | {"viewBox": f"0 0 {width:g} {height:g}"}))
        svg.add("title", {"id": f"{key}-title"}, title)
        svg.add("desc", {"id": f"{key}-description"}, description)
        return svg

    def add(self, tag: str, attributes: dict[str, str], words: str | None = None) -> Self:
        """Add an element, and return it to be drawn into."""
        element = ElementTree.SubElement(self.element, tag, attributes)
        element.text = words and printable(words)  # which ElementTree escapes
        return replace(self, element=element)

    def group(self, look: str) -> Self:
        """A group of one of the page's classes."""
        return self.add("g", {"class": look})

    def path(self, look: str, path: str, **attributes: str) -> Self:
        """A path of one of the page's classes."""
        return self.add("path", {"class": look, **attributes, "d": path})

    def text(self, words: str, x: float, y: float, anchor: str = "", **attributes: str) -> None:
        """A text, whose start is at this place, or as `anchor` says its middle or its end."""
        place = {"x": str(x), "y": str(y)} | ({"text-anchor": anchor} if anchor else {})
        self.add("text", place | attributes, words)

    def title(self, words: str) -> None:
        """Say what it is to who points at it."""
        self.add("title", {}, words)

    def markup(self) -> Markup:
        """The drawing for the page."""
        return Markup(ElementTree.tostring(self.element, encoding="unicode", short_empty_elements=False))


def values_of(series: Sequence[Series]) -> list[float]:
    """Return all values of these lines, and the edges of their bands."""
    values = [value for one in series for value in one.values if value is not None]
    return values + [edge for one in series for edges in one.band if edges for edge in edges]


def band_of(curves: Sequence[Sequence[float | None]]) -> list[tuple[float, float] | None]:
    """Return the lowest and the highest of several curves at each place; nothing where one has no value."""
    columns = zip(*curves, strict=False) if len(curves) > 1 else ()
    return [None if None in column else (min(column), max(column)) for column in columns]


def styles(references: Sequence[bool]) -> list[int]:
    """Return a style for each method: 0, 1, 2, … for federations, -1 and -2 for what they are held against."""
    found, counts = [], [0, 0]
    for reference in references:
        found.append(-1 - counts[1] % INKS if reference else counts[0])
        counts[reference] += 1
    return found


def colour(style: int) -> str:
    """Return the page's class for the colour of a style."""
    return f"s{style % COLOURS}" if style >= 0 else f"r{-1 - style}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten apart) that enclose low and high."""
    if high - low < 1e-9:  # less than what is written tells apart
        low, high = low - 0.05, high + 0.05
    exponent = math.floor(math.log10((high - low) / most))
    for step in (factor * 10.0**power for power in range(exponent, exponent + 3) for factor in (1, 2, 5)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [round(number * step, 10) for number in range(first, last + 1)]


def line_chart(
    series: Sequence[Series],
    *,
    key: str,
    title: str,
    x_label: str,
    y_label: str,
    y_ticks: Sequence[float] = (),
    last_x: float | None = None,
    unit: str = "rounds",
    guide: Sequence[tuple[float, float]] = (),
) -> Markup:
    """One chart. `key` makes its ids unique in the page; `y_ticks` and `last_x` may be shared to make charts alike, and
    are by default as far as the lines go.

    guide: the corners of a thin line to hold the others against.
    """
    svg = Drawing.start(WIDTH, HEIGHT, key, title, describe(series, unit))
    if not y_ticks:
        known = values_of(series)
        y_ticks = ticks(min(known), max(known))
    if last_x is None:
        last_x = max(one.place(n) for one in series for n in range(len(one.values)))
    plot = _Plot(y_ticks[0], y_ticks[-1], last_x or 1)
    _axes(svg, plot, y_ticks, x_label, y_label, whole=unit == "rounds")
    if guide:
        corners = "L".join(f"{plot.x(x)} {plot.y(y)}" for x, y in guide)
        svg.path("line chance", f"M{corners}")
    every = max([1, *(math.ceil(len(one.values) * len(series) / MOST_MARKERS) for one in series)])
    for one in series:
        _series(svg, plot, one, every, unit)
    return svg.markup()


def swatch(style: int) -> Markup:
    """A piece of a series' line with its marker, for a legend."""
    svg = Drawing(ElementTree.Element("svg", {"class": "swatch", "viewBox": "0 0 34 12", "aria-hidden": "true"}))
    group = svg.group(colour(style))
    _draw_line(group, style, "M1 6H33")
    group.path("mark", marker(style, 17, 6))
    return svg.markup()


def describe(series: Sequence[Series], unit: str = "rounds") -> str:
    """The chart in words: where each line starts and ends."""
    sentences = []
    for one in series:
        known = [(one.place(n), value) for n, value in enumerate(one.values) if value is not None]
        if not known:
            sentences.append(f"{one.name}: no values.")
        else:
            (start, first), (end, last) = known[0], known[-1]
            sentences.append(f"{one.name}: {first:.3f} after {start:.4g} {unit}, {last:.3f} after {end:.4g}.")
    return " ".join(sentences)


@dataclass(frozen=True)
class _Plot:
    """A scale: finds the place of a value on the drawing."""

    low: float
    high: float
    last: float

    def x(self, position: float) -> float:
        return round(LEFT + position / self.last * (WIDTH - RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM), 1)


def _axes(svg: Drawing, plot: _Plot, y_ticks: Sequence[float], x_label: str, y_label: str, whole: bool) -> None:
    decimals = max((len(f"{tick:.10f}".rstrip("0").partition(".")[2]) for tick in y_ticks), default=0)
    for tick in y_ticks:
        svg.path("gridline", f"M{LEFT} {plot.y(tick)}H{WIDTH - RIGHT}")
        svg.text(f"{tick:.{decimals}f}", LEFT - 7, plot.y(tick) + 4, "end")
    floor = HEIGHT - BOTTOM
    svg.path("axis", f"M{LEFT} {floor}H{WIDTH - RIGHT}")
    for position in ticks(0, plot.last, most=9):
        if position <= plot.last and (position == int(position) or not whole):
            svg.path("axis", f"M{plot.x(position)} {floor}v4")
            svg.text(f"{position:g}", plot.x(position), floor + 17, "middle")
    centre = (LEFT + WIDTH - RIGHT) / 2
    svg.text(x_label, centre, HEIGHT - 6, "middle", **{"class": "label"})
    middle = (TOP + floor) / 2
    svg.text(y_label, 12, middle, "middle", **{"class": "label"}, transform=f"rotate(-90 12 {middle})")


def _series(svg: Drawing, plot: _Plot, one: Series, every: int, unit: str) -> None:
    group = svg.group(colour(one.style))
    if edges := [(plot.x(one.place(n)), *map(plot.y, pair)) for n, pair in enumerate(one.band) if pair]:
        around = [f"{x} {low}" for x, low, _ in edges] + [f"{x} {high}" for x, _, high in reversed(edges)]
        group.path("band", f"M{'L'.join(around)}z")
    known = [(n, value, plot.x(one.place(n)), plot.y(value)) for n, value in enumerate(one.values) if value is not None]
    if known:
        _draw_line(group, one.style, f"M{'L'.join(f'{x} {y}' for *_, x, y in known)}")
    for place, (n, value, x, y) in enumerate(known):
        if n == one.ring:
            group.add("circle", {"class": "ring", "cx": str(x), "cy": str(y), "r": "7"})
        if place % every == 0 or n == one.ring or place == len(known) - 1:
            mark = group.path("mark", marker(one.style, x, y))
            mark.title(f"{one.name}, after {one.place(n):.4g} {unit}: {value:.3f}")


def _draw_line(parent: Drawing, style: int, path: str) -> None:
    dash = DASHES[style % len(DASHES)]
    parent.path("line", path, **({"stroke-dasharray": dash} if dash else {}))


def marker(style: int, x: float, y: float) -> str:
    """The outline of a marker around (x, y); the shapes have about the same area."""
    return f"M{x} {y}{MARKERS[style % len(MARKERS)]}"


# ---------------------------------------------------------------------------------------------------- differences
@dataclass(frozen=True)
class Whisker:
    """A difference with its interval, as a dot on a whisker, and both in words."""

    value: float
    interval: tuple[float, float]
    style: int
    words: str


def whisker_chart(one: Whisker, marks: Sequence[float], key: str, title: str, numbered: bool) -> Markup:
    """Draw a difference over an axis, which several such drawings share; a broken line stands at zero.

    numbered: whether the axis has its numbers.
    """
    svg = Drawing.start(AXIS + 2 * EDGE, ROW + (FOOT if numbered else 0), key, title, f"{one.words}.", small=True)

    def place(value: float) -> float:
        return round(EDGE + (value - marks[0]) / (marks[-1] - marks[0]) * AXIS, 1)

    for mark in marks:
        svg.path("gridline", f"M{place(mark)} 0V{ROW}")
        if numbered:
            svg.text(f"{mark:+g}".replace("-", "−") if mark else "0", place(mark), ROW + 16, "middle")
    svg.path("chance", f"M{place(0.0)} 0V{ROW}")
    group = svg.group(colour(one.style))
    group.title(one.words)
    low, high = map(place, one.interval)
    group.path("whisker", f"M{low} {ROW / 2:g}H{high}")
    group.path("mark", marker(one.style, place(one.value), ROW / 2))
    return svg.markup()


def shared_axis(several: Sequence[Whisker]) -> list[float]:
    """Return the marks of an axis on which all of these have room, and zero."""
    ends = [0.0, *(end for one in several for end in (one.value, *one.interval))]
    return ticks(min(ends), max(ends))
