"""The rounds on the server's clock: each site at work, waiting or missing, as a picture."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from medsilo.report.charts import Series, draw_text, line_chart, start_svg, swatch, ticks, to_markup
from medsilo.report.formats import bytes_text, seconds_text
from medsilo.report.pictures import shortened
from medsilo.report.read import RunResult, spans
from medsilo.runs.schema import SiteRound

LEFT, WIDTH, RIGHT, ROW, FOOT = 96, 480, 104, 20, 22
STEADY = 0.005  # by which a share may move and still be drawn as one number
MARKS = {"refused": "✕", "lost": "○", "missed": "○"}


def timeline(run: RunResult, key: str) -> Markup:
    """A row for each site: dark while it worked, light while it waited or sent, marked where it is missing."""
    lengths = [line.seconds or 0.0 for line in run.rounds]
    timed = all(lengths)
    starts = [0.0, *accumulate(lengths if timed else [1.0] * len(lengths))]
    scale = WIDTH / (starts[-1] or 1)
    absent = {(one.site, one.round): one for one in run.absences()}
    words, height = [], len(run.sites) * ROW + FOOT
    svg = start_svg(
        LEFT + WIDTH + RIGHT, height, key, f"{run.label}: who worked, waited and was missing", "", small=True
    )
    for place, site in enumerate(run.sites):
        top, worked, waited = place * ROW + 3, [], []
        draw_text(svg, shortened(site), x=LEFT - 6, y=top + 11, **{"text-anchor": "end"})
        row = ElementTree.SubElement(svg, "g")
        for number, line in enumerate(run.rounds):
            start, end = LEFT + starts[number] * scale, LEFT + starts[number + 1] * scale
            if one := absent.get((site, line.round)):
                mark = ElementTree.SubElement(row, "g", {"class": one.kind})
                draw_text(mark, f"{site}, round {line.round}: {one.text}", "title")
                draw_text(mark, MARKS[one.kind], x=round((start + end) / 2, 1), y=top + 11, **{"text-anchor": "middle"})
            elif site in line.answered:
                told = line.sites.get(site)
                share = min((told.seconds if told else 0) / lengths[number], 1) if timed else 1
                middle = start + share * (end - start)
                worked.append(f"M{start:.1f} {top}H{middle:.1f}v14H{start:.1f}z")
                waited.append(f"M{middle:.1f} {top}H{end:.1f}v14H{middle:.1f}z")
        ElementTree.SubElement(row, "path", {"class": "waited", "d": "".join(waited)})
        ElementTree.SubElement(row, "path", {"class": "worked", "d": "".join(worked)})
        own = run.site(site)
        draw_text(svg, f"{bytes_text(own.bytes_up)} sent", x=LEFT + WIDTH + 6, y=top + 11)
        missing = spans(number for of, number in absent if of == site)
        words.append(
            f"{site} worked {seconds_text(own.seconds)} and sent {bytes_text(own.bytes_up)}"
            f"{f', missing in round {missing}' if missing else ''}."
        )
    for second in ticks(0, starts[-1], most=9):
        if second <= starts[-1]:
            draw_text(svg, f"{second:g}", x=round(LEFT + second * scale, 1), y=height - 6, **{"text-anchor": "middle"})
    draw_text(svg, "seconds" if timed else "rounds", x=LEFT + WIDTH + 6, y=height - 6)
    svg[1].text = " ".join(words)
    return to_markup(svg)


def apart(run: RunResult, key: str) -> dict[str, Any] | None:
    """Return each site's direction by round: the mean cosine of what it sent and the mean of the others."""

    def cosine(told: SiteRound) -> float | None:
        known = [one.cosine for one in told.updates.values() if one.cosine is not None]
        return sum(known) / len(known) if known else None

    return _by_round(run, key, "direction of what each site sent, against the others'", "cosine", cosine)


def shares(run: RunResult, key: str) -> dict[str, Any] | None:
    """Return how much each site counted in each round's mean; nothing where that stayed as it was."""
    told = [[one.share for line in run.rounds if (one := line.sites.get(site))] for site in run.sites]
    known = [[share for share in own if share is not None] for own in told]
    if not any(max(own) - min(own) > STEADY for own in known if own):
        return None
    return _by_round(run, key, "how much each site counted in the mean", "share", lambda told: told.share)


def _by_round(
    run: RunResult, key: str, title: str, label: str, fact: Callable[[SiteRound], float | None]
) -> dict[str, Any] | None:
    """Return a chart with a line for each site, of what each round tells of it."""
    places = [float(line.round) for line in run.rounds]
    series = [
        Series(site, [fact(line.sites[site]) if site in line.sites else None for line in run.rounds], n, places=places)
        for n, site in enumerate(run.sites)
    ]
    known = [value for one in series for value in one.values if value is not None]
    if not known:
        return None
    chart = line_chart(
        series,
        key=key,
        title=f"{run.label}: {title}",
        x_label="rounds",
        y_label=label,
        y_ticks=ticks(min(known), max(known)),
        last_x=run.rounds[-1].round,
    )
    return {"chart": chart, "legend": [{"name": one.name, "swatch": swatch(one.style)} for one in series]}
