"""Matrices, and rounds on the server's clock, as inline SVG like the line charts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from markupsafe import Markup

from medsilo_lab.report.charts import Drawing, Series, line_chart, shortened, swatch, ticks
from medsilo_lab.report.formats import bytes_text, seconds_text
from medsilo_lab.report.read import RunResult, spans


def matrix_strip(told: Sequence[tuple[str, Sequence[Sequence[float]]]], sites: Sequence[str], key: str) -> Markup:
    """Draw matrices beside each other: the darker a cell, the larger its number. What a site keeps is only framed."""
    size = max(4, min(14, 112 // len(sites)))
    wide, most = size * len(sites), max((value for _, rows in told for value, *_ in others(rows)), default=0) or 1
    words = " ".join(f"{caption}: {_strongest(rows, sites)}" for caption, rows in told)
    svg = Drawing.start(len(told) * (wide + 24), wide + 22, key, "Who learned from whom, by round", words, small=True)
    for place, (caption, rows) in enumerate(told):
        left = place * (wide + 24) + 12
        svg.text(caption, left + wide / 2, 12, "middle")
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                look, shade = (
                    ("gridline", {"fill": "none"}) if i == j else ("worked", {"fill-opacity": f"{value / most:.2f}"})
                )
                area = f"M{left + j * size} {20 + i * size}h{size - 1}v{size - 1}h{1 - size}z"
                cell = svg.path(look, area, **shade)
                cell.title(f"{caption}: {sites[i]} takes {value:.2f} of {sites[j]}")
    return svg.markup()


def others(rows: Sequence[Sequence[float]]) -> Iterator[tuple[float, int, int]]:
    """Yield what each site takes from each other one, with the places of both."""
    return ((value, i, j) for i, row in enumerate(rows) for j, value in enumerate(row) if i != j)


def _strongest(rows: Sequence[Sequence[float]], sites: Sequence[str]) -> str:
    value, i, j = max(others(rows))
    return f"most, {value:.2f}, goes from {sites[j]} to {sites[i]}."


LEFT, WIDTH, RIGHT, LANE, CLOCK = 96, 480, 104, 20, 22
STEADY = 0.005  # by which a share may move and still be drawn as one number
MARKS = {"refused": "✕", "lost": "○"}


def timeline(run: RunResult, key: str) -> Markup:
    """A row for each site: dark while it worked, light while it waited or sent, marked where it is missing."""
    lengths = [line.seconds or 0.0 for line in run.rounds]
    starts = [0.0, *accumulate(lengths)]
    scale = WIDTH / (starts[-1] or 1)
    words, height = [], len(run.sites) * LANE + CLOCK
    svg = Drawing.start(
        LEFT + WIDTH + RIGHT, height, key, f"{run.label}: who worked, waited and was missing", "", small=True
    )
    for place, site in enumerate(run.sites):
        top, worked, waited, missed = place * LANE + 3, [], [], run.missed(site)
        svg.text(shortened(site), LEFT - 6, top + 11, "end")
        row = svg.group("row")
        for number, line in enumerate(run.rounds):
            start, end = LEFT + starts[number] * scale, LEFT + starts[number + 1] * scale
            if why := missed.get(line.round):
                kind = why.partition(":")[0]
                mark = row.group(kind)
                mark.title(f"{site}, round {line.round}: {why}")
                mark.text(MARKS[kind], round((start + end) / 2, 1), top + 11, "middle")
            elif site in line.answered:
                told = line.sites.get(site)
                share = min(told.seconds / lengths[number], 1) if told and lengths[number] else 0.0
                middle = start + share * (end - start)
                worked.append(f"M{start:.1f} {top}H{middle:.1f}v14H{start:.1f}z")
                waited.append(f"M{middle:.1f} {top}H{end:.1f}v14H{middle:.1f}z")
        row.path("waited", "".join(waited))
        row.path("worked", "".join(worked))
        own = run.site(site)
        svg.text(f"{bytes_text(own.bytes_up)} sent", LEFT + WIDTH + 6, top + 11)
        words.append(
            f"{site} worked {seconds_text(own.seconds)} and sent {bytes_text(own.bytes_up)}"
            f"{f', missing in round {spans(missed)}' if missed else ''}."
        )
    for second in ticks(0, starts[-1], most=9):
        if second <= starts[-1]:
            svg.text(f"{second:g}", round(LEFT + second * scale, 1), height - 6, "middle")
    svg.text("seconds", LEFT + WIDTH + 6, height - 6)
    svg.element[1].text = " ".join(words)
    return svg.markup()


def shares(run: RunResult, key: str) -> dict[str, Any] | None:
    """Return a chart of how much each site counted in each round's mean; nothing where that stayed as it was."""
    told = [[one.share if (one := line.sites.get(site)) else None for line in run.rounds] for site in run.sites]
    known = [[share for share in own if share is not None] for own in told]
    if not any(max(own) - min(own) > STEADY for own in known if own):
        return None
    places = [float(line.round) for line in run.rounds]
    series = [Series(site, own, n, places=places) for n, (site, own) in enumerate(zip(run.sites, told, strict=True))]
    title = f"{run.label}: how much each site counted in the mean"
    chart = line_chart(series, key=key, title=title, x_label="rounds", y_label="share")
    return {"chart": chart, "legend": [{"name": one.name, "swatch": swatch(one.style)} for one in series]}
