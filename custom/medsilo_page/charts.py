"""Draw line charts and charts of differences as inline SVG, which screen readers and people without colour vision can
read. The module uses no drawing library and no script.

Colours come from the CSS classes of the page: `s0` to `s7` for methods, and `r0` and `r1` for reference methods.
Because the colours come from CSS classes, a drawing works in light mode, in dark mode and in print. Each line also has
a dash pattern and a marker, for black-and-white print and for colour-blind readers. No drawing library is used, because
drawing libraries support neither the page's CSS classes nor texts for screen readers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.core.text import printable
from medsilo.runs.score import number_text

WIDTH, HEIGHT = 350, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 42
# number of colours that colour-blind readers can distinguish from each other and from the colours of reference methods
COLOURS = 8
INKS = 2
# with five dash patterns, seven markers and eight colours, no combination repeats
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4")
MARKERS = (
    "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "m-3.2 -3.2h6.4v6.4h-6.4z",
    "m0 -4.4l4.2 7.4h-8.4z",
    "m0 -4.8l4.2 4.8l-4.2 4.8l-4.2 -4.8z",
    "m0 4.4l4.2 -7.4h-8.4z",
    "m-1.6 -5h3.2v10h-3.2z",
    "m-1.4 -4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3z",
)
# height of a row, height of the footer, width of the axis and width of the margin in a chart of differences, in pixels
ROW, FOOT, AXIS, EDGE = 22, 24, 288, 18
GREY = 100  # style of background lines, which are thin, grey and without markers
MOST_MARKERS = 120


@dataclass(frozen=True)
class Series:
    """A line in a chart, with a value at each of its points. The n-th value `values[n]` is drawn at the x coordinate
    `places[n]`; without `places`, the value is drawn at n. Missing values (None) are skipped.

    The point with the index `ring` is circled. At each point, `band` has the lower and the upper edge of a shaded band.
    """

    name: str
    values: Sequence[float | None]
    style: int = 0
    ring: int | None = None
    places: Sequence[float] | None = None
    band: Sequence[tuple[float, float] | None] = ()
    words: Sequence[str] = ()  # texts that replace the formatted values; if empty, the formatted values are shown

    def said(self, n: int) -> str:
        return self.words[n] if self.words else number_text(self.values[n])

    def place(self, n: int) -> float:
        return n if self.places is None else self.places[n]


@dataclass(frozen=True)
class Drawing:
    element: ElementTree.Element

    @classmethod
    def start(cls, width: float, height: float, key: str, title: str, description: str, small: bool = False) -> Self:
        """Create a drawing that has a title and a description. If `small` is true, the page does not stretch the
        drawing, and the text in the drawing is smaller.
        """
        labels = {"role": "img", "aria-labelledby": f"{key}-title", "aria-describedby": f"{key}-description"}
        look = {"class": "chart picture", "style": f"max-width:{width:g}px"} if small else {"class": "chart"}
        svg = cls(ElementTree.Element("svg", look | labels | {"viewBox": f"0 0 {width:g} {height:g}"}))
        svg.add("title", {"id": f"{key}-title"}, title)
        svg.add("desc", {"id": f"{key}-description"}, description)
        return svg

    def add(self, tag: str, attributes: dict[str, str], words: str | None = None) -> Self:
        element = ElementTree.SubElement(self.element, tag, attributes)
        element.text = words and printable(words)  # ElementTree escapes characters such as < and &
        return replace(self, element=element)

    def group(self, look: str) -> Self:
        return self.add("g", {"class": look})

    def path(self, look: str, path: str, **attributes: str) -> Self:
        return self.add("path", {"class": look, **attributes, "d": path})

    def text(self, words: str, x: float, y: float, anchor: str = "", **attributes: str) -> None:
        """Add a text that starts at the point (x, y). With `anchor`, the middle or the end of the text is at the point
        (x, y) instead.
        """
        place = {"x": str(x), "y": str(y)} | ({"text-anchor": anchor} if anchor else {})
        self.add("text", place | attributes, words)

    def title(self, words: str) -> None:
        self.add("title", {}, words)

    def markup(self) -> Markup:
        return Markup(ElementTree.tostring(self.element, encoding="unicode", short_empty_elements=False))


def values_of(series: Sequence[Series]) -> list[float]:
    values = [value for one in series for value in one.values if value is not None]
    return values + [edge for one in series for edges in one.band if edges for edge in edges]


def band_of(curves: Sequence[Sequence[float | None]]) -> list[tuple[float, float] | None]:
    """Return the lowest and highest value of several curves at each point, or None at points where a curve has no
    value.
    """
    columns = zip(*curves, strict=False) if len(curves) > 1 else ()
    return [None if None in column else (min(column), max(column)) for column in columns]


def drawn_last(series: Sequence[Series]) -> list[Series]:
    """Sort lines so that grey lines are drawn first, below all other lines."""
    return sorted(series, key=lambda one: one.style != GREY)


def styles(references: Sequence[bool]) -> list[int]:
    """Return a style for each method: 0, 1, 2, … for federated methods, -1 and -2 for reference methods."""
    found, counts = [], [0, 0]
    for reference in references:
        found.append(-1 - counts[1] % INKS if reference else counts[0])
        counts[reference] += 1
    return found


def colour(style: int) -> str:
    if style == GREY:
        return "grey"
    return f"s{style % COLOURS}" if style >= 0 else f"r{-1 - style}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers, of which the first is at most low and the last is at least high. The numbers
    are evenly spaced, and the step between them is 1, 2 or 5 times a power of ten.
    """
    if high - low < 1e-9:  # if the range is tiny, all numbers on the axis would have the same digits
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
    """Draw a chart of several lines that have the same x axis.

    Args:
        guide: points of a thin line for comparison
        key: prefix that makes the ids in the page unique
        y_ticks, last_x: axis limits, which several charts may share; by default the range of the lines
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
    for one in drawn_last(series):
        _series(svg, plot, one, every, unit)
    return svg.markup()


def swatch(style: int) -> Markup:
    svg = Drawing(ElementTree.Element("svg", {"class": "swatch", "viewBox": "0 0 34 12", "aria-hidden": "true"}))
    group = svg.group(colour(style))
    _draw_line(group, style, "M1 6H33")
    if style != GREY:
        group.path("mark", marker(style, 17, 6))
    return svg.markup()


def describe(series: Sequence[Series], unit: str = "rounds") -> str:
    """Describe a chart in words for screen readers: the first and last value of each line."""
    sentences = []
    for one in series:
        known = [(one.place(n), one.said(n)) for n, value in enumerate(one.values) if value is not None]
        if not known:
            sentences.append(f"{one.name}: no values.")
        else:
            (start, first), (end, last) = known[0], known[-1]
            sentences.append(f"{one.name}: {first} after {start:.4g} {unit}, {last} after {end:.4g}.")
    return " ".join(sentences)


@dataclass(frozen=True)
class _Plot:
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


def _series(svg: Drawing, plot: _Plot, series: Series, every: int, unit: str) -> None:
    group = svg.group(colour(series.style))
    band = () if series.style == GREY else series.band
    if edges := [(plot.x(series.place(n)), *map(plot.y, pair)) for n, pair in enumerate(band) if pair]:
        around = [f"{x} {low}" for x, low, _ in edges] + [f"{x} {high}" for x, _, high in reversed(edges)]
        group.path("band", f"M{'L'.join(around)}z")
    known = [
        (n, value, plot.x(series.place(n)), plot.y(value)) for n, value in enumerate(series.values) if value is not None
    ]
    if known:
        _draw_line(group, series.style, f"M{'L'.join(f'{x} {y}' for *_, x, y in known)}")
    if series.style == GREY:
        group.title(series.name)
        return
    for place, (n, _, x, y) in enumerate(known):
        if n == series.ring:
            group.add("circle", {"class": "ring", "cx": str(x), "cy": str(y), "r": "7"})
        if place % every == 0 or n == series.ring or place == len(known) - 1:
            mark = group.path("mark", marker(series.style, x, y))
            mark.title(f"{series.name}, after {series.place(n):.4g} {unit}: {series.said(n)}")


def _draw_line(parent: Drawing, style: int, path: str) -> None:
    dash = "" if style == GREY else DASHES[style % len(DASHES)]
    parent.path("line", path, **({"stroke-dasharray": dash} if dash else {}))


def marker(style: int, x: float, y: float) -> str:
    """Return the SVG path of a marker at (x, y); the markers of all styles have similar areas."""
    return f"M{x} {y}{MARKERS[style % len(MARKERS)]}"


# ---------------------------------------------------------------------------------------------------- differences
@dataclass(frozen=True)
class Whisker:
    """A value and its confidence interval in a chart. The value is drawn as a dot and `interval` as a whisker; if
    `wider` is not None, it is drawn as a thin line.
    """

    value: float
    interval: tuple[float, float] | None
    style: int
    words: str
    wider: tuple[float, float] | None = None
    alone: float | None = None
    pooled: float | None = None


HOLLOW = {"alone": MARKERS[0], "pooled": MARKERS[3]}


def whisker_chart(whisker: Whisker, marks: Sequence[float], key: str, title: str, zero: bool = True) -> Markup:
    """Draw a value and its confidence interval; `axis_of` draws the axis, which several drawings share. If `zero` is
    true, the chart has a dashed line at 0.
    """
    svg = Drawing.start(AXIS + 2 * EDGE, ROW, key, title, f"{whisker.words}.", small=True)
    place = _scale(marks)
    for mark in marks:
        svg.path("gridline", f"M{place(mark)} 0V{ROW}")
    if zero:
        svg.path("chance", f"M{place(0.0)} 0V{ROW}")
    group = svg.group(colour(whisker.style))
    group.title(whisker.words)
    for look, ends in (("whisker wider", whisker.wider), ("whisker", whisker.interval)):
        if ends:
            group.path(look, f"M{place(ends[0])} {ROW / 2:g}H{place(ends[1])}")
    for look, outline in HOLLOW.items():
        value = getattr(whisker, look)
        if value is not None:
            svg.path(f"hollow {look}", f"M{place(value)} {ROW / 2:g}{outline}")
    group.path("mark", marker(whisker.style, place(whisker.value), ROW / 2))
    return svg.markup()


def axis_of(marks: Sequence[float], signed: bool) -> Markup:
    """Draw the axis that several drawings share, with a number at each tick mark. If `signed` is true, positive numbers
    have plus signs.
    """
    look = {"class": "chart picture", "style": f"max-width:{AXIS + 2 * EDGE}px", "aria-hidden": "true"}
    svg = Drawing(ElementTree.Element("svg", look | {"viewBox": f"0 0 {AXIS + 2 * EDGE} {FOOT}"}))
    place, decimals = _scale(marks), max(len(f"{mark:.10f}".rstrip("0").partition(".")[2]) for mark in marks)
    for mark in marks:
        words = f"{mark:+g}".replace("-", "−") if signed else f"{mark:.{decimals}f}"
        svg.text(words if mark or not signed else "0", place(mark), FOOT - 11, "middle")
        svg.path("gridline", f"M{place(mark)} {FOOT - 6}V{FOOT}")
    return svg.markup()


def _scale(marks: Sequence[float]) -> Callable[[float], float]:
    return lambda value: round(EDGE + (value - marks[0]) / (marks[-1] - marks[0]) * AXIS, 1)


def shared_axis(several: Sequence[Whisker], zero: bool = True) -> list[float]:
    """Return the tick marks of an axis for the values and intervals of several drawings. If `zero` is true, the axis
    includes 0.
    """
    ends = [0.0] * zero
    for one in several:
        values = (one.value, one.alone, one.pooled, *(one.interval or ()), *(one.wider or ()))
        ends += [value for value in values if value is not None]
    return ticks(min(ends), max(ends))
