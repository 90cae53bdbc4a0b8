"""One self-contained HTML page about one or many runs: it opens without a network and prints."""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medsilo import __version__
from medsilo.report import findings
from medsilo.report.charts import NARROW, WIDE, Series, line_chart, swatch, ticks
from medsilo.report.pictures import Bars, heat_map, site_bars
from medsilo.report.read import Absence, Run, SuperModelFacts, all_sites, read_all, spans
from medsilo.report.table import MISSING, number

HERE = Path(__file__).parent
LONG_GRID = 20
MARKS = {"answered": "●", "refused": "✕", "lost": "○", "missed": "○", "not asked": "·"}


def write(runs: Sequence[Path], destination: Path, title: str) -> Path:
    """Read the run folders, write the page and return where it is. A reader never sees half a page."""
    page = render(read_all(runs), title)
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        # A half character in some site's message must not cost the report.
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(destination)
    finally:
        draft.unlink(missing_ok=True)
    return destination


def render(runs: Sequence[Run], title: str) -> str:
    """The page as text; it depends on nothing but the runs and the title."""
    # Escaping is on for everything: site names, reasons and plans come from other machines.
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (HERE / "sort.html").read_text(encoding="utf-8").strip()
    return environment.get_template("page.html").render(
        title=title,
        style=Markup((HERE / "style.html").read_text(encoding="utf-8").strip()),
        script=Markup(script),
        script_hash=_script_hash(script),
        version=__version__,
        single=len(runs) == 1,
        sites=all_sites(runs),
        context=_context(runs),
        answer=findings.answer(runs),
        notices=findings.notices(runs),
        results=_results(runs),
        gains=_gains(runs),
        crossed=[_crossed(run) for run in runs if run.cross],
        curves=_curves(runs),
        harmonised=[run for run in runs if run.pictures or run.amplitude],
        similarity=_similarity(runs),
        super_models=[_super_model(run) for run in runs if run.summary.details.super_model],
        unseen=[_unseen(run) for run in runs if run.summary.unseen],
        participation=[_participation(run) for run in runs if not findings.is_central(run)],
        agreed=_same(runs, _agreed),
        costs=_costs(runs),
        provenance=_provenance(runs),
        limits=findings.limits(runs),
    )


def _script_hash(script: str) -> str:
    """The page's policy allows this one script by its hash, so nothing that slipped into the page could run."""
    code = script.removeprefix("<script>").removesuffix("</script>")
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def _cell(value: float | None, text: str | None = None) -> dict[str, Any]:
    """A table cell: what is shown and what it is sorted by."""
    return {"value": "" if value is None else value, "text": number(value) if text is None else text, "ratio": ""}


def _context(runs: Sequence[Run]) -> str:
    """Task, network and size of the comparison in one line below the title."""
    count = len(all_sites(runs))
    parts = [
        _same(runs, lambda run: run.summary.task_title or run.summary.task),
        f"{count} site{'s' if count != 1 else ''}",
        runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        _same(runs, lambda run: f"{run.summary.rounds.planned} rounds"),
        _same(runs, lambda run: run.summary.network),
    ]
    return " · ".join(part for part in parts if part)


def _same(runs: Sequence[Run], view: Callable[[Run], Any]) -> Any:
    """What all runs agree on, or None."""
    values = {view(run) for run in runs}
    return values.pop() if len(values) == 1 else None


def _results(runs: Sequence[Run]) -> dict[str, Any]:
    sites = all_sites(runs)
    rows = [
        {
            "label": run.label,
            "failed": run.failed,
            "reference": findings.is_reference(run),
            "cells": [_cell(run.score(site)) for site in sites],
            "mean": _cell(run.summary.mean_test),
            "pooled": _cell(run.summary.pooled_test),
        }
        for run in runs
    ]
    heads = [{"name": site, "cases": _same(runs, partial(Run.test_cases, site=site))} for site in sites]
    return {"metric": _same(runs, lambda run: run.summary.metric), "heads": heads, "rows": rows}


def _gains(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {"label": gain.label, "cells": [_cell(value, findings.signed(value)) for value in gain.differences.values()]}
        for gain in findings.gains(runs)
    ]


def _crossed(run: Run) -> dict[str, Any]:
    """One site's model per row, one site's test data per column."""
    rows = []
    for owner in run.sites:
        scores, mean, pooled = run.elsewhere(owner)
        cells = [_cell(score) | {"own": site == owner} for site, score in zip(run.sites, scores, strict=True)]
        rows.append({"owner": owner, "cells": cells, "mean": _cell(mean), "pooled": _cell(pooled)})
    return {"label": run.label, "metric": run.summary.metric, "sites": run.sites, "rows": rows}


def _curves(runs: Sequence[Run]) -> dict[str, Any]:
    """One chart of all methods' means, one chart per method with its sites, and the numbers behind them."""
    sites = all_sites(runs)
    alike = _same(runs, lambda run: run.summary.metric) is not None
    means = [Series(run.label, _mean_curve(run), style) for style, run in enumerate(runs)]
    per_run = []
    for position, run in enumerate(runs):
        series = [
            Series(site, run.site(site).validation, style, run.summary.selected.rounds.get(site))
            for style, site in enumerate(sites)
            if any(value is not None for value in run.site(site).validation)
        ]
        per_run.append(
            {
                "label": run.label,
                "chart": _chart(f"curve-{position}", run.label, series, runs if alike else [run]) if series else None,
                "rows": [_numbers_row(run, site) for site in run.sites],
                "rounds": range(_last_round([run]) + 1),
            }
        )
    drawn = [one for one in means if any(value is not None for value in one.values)]
    together = alike and len(runs) > 1 and bool(drawn)
    return {
        "site_legend": [{"name": site, "swatch": swatch(style)} for style, site in enumerate(sites)],
        "mean_legend": [{"name": one.name, "swatch": swatch(one.style)} for one in drawn],
        "mean": _chart("curve-mean", "Mean over sites", drawn, runs, WIDE) if together else None,
        "runs": per_run,
    }


def _chart(key: str, title: str, series: Sequence[Series], runs: Sequence[Run], width: int = NARROW) -> Markup:
    values = [value for run in runs for site in run.sites for value in run.site(site).validation if value is not None]
    metric = runs[0].summary.metric
    return line_chart(
        series,
        key=key,
        title=f"{title}: validation {metric} by round",
        x_label="rounds",
        y_label=f"validation {metric}",
        y_ticks=ticks(min(values), max(values)),
        last_x=_last_round(runs),
        width=width,
    )


def _last_round(runs: Iterable[Run]) -> int:
    lengths = [len(run.site(site).validation) - 1 for run in runs for site in run.sites]
    return max([0, *lengths])


def _mean_curve(run: Run) -> list[float | None]:
    """Mean over sites; no value where a site has none, because a mean over fewer sites would jump for no reason."""
    curves = [run.site(site).validation for site in run.sites]
    columns = [[curve[x] if x < len(curve) else None for curve in curves] for x in range(_last_round([run]) + 1)]
    return [None if None in column or not column else sum(filter(None, column)) / len(column) for column in columns]


def _numbers_row(run: Run, site: str) -> dict[str, Any]:
    curve = run.site(site).validation
    padded = [*curve, *[None] * (_last_round([run]) + 1 - len(curve))]
    selected = run.summary.selected.rounds.get(site)
    return {"site": site, "cells": [number(value) for value in padded], "selected": selected}


def _similarity(runs: Sequence[Run]) -> dict[str, Any]:
    """Who learns from whom, in the runs whose method weighs sites, and every site's score beside the other methods'."""
    maps = []
    for position, run in enumerate(runs):
        found, started = run.summary.details.similarity, run.summary.details.pretraining
        if found is None:
            continue
        title = f"{run.label}: how much each site (row) takes from each (column)"
        picture = heat_map(found.sites, found.weights, key=f"similarity-{position}", title=title)
        maps.append({"label": run.label, "map": picture, "source": _pretrained(started)})
    if not maps:
        return {"maps": [], "bars": None, "legend": []}
    sites, metric = all_sites(runs), _same(runs, lambda run: run.summary.metric)
    bars = [Bars(run.label, [run.score(site) for site in sites], style) for style, run in enumerate(runs)]
    drawn = metric is not None and any(value is not None for one in bars for value in one.values)
    chart = site_bars(sites, bars, key="site-bars", title=f"Test {metric} at every site") if drawn else None
    return {"maps": maps, "bars": chart, "legend": [{"name": b.name, "swatch": swatch(b.style)} for b in bars]}


def _super_model(run: Run) -> dict[str, Any]:
    """Whose model answered for each site's test cases, and the scores of the thresholds that were tried."""
    facts = run.summary.details.super_model
    assert facts is not None
    names = ["global", *facts.agreed]
    tables = [("Validation cases", facts.validated)] if facts.rule == "threshold" else []
    tables.append(("Test cases", facts.tested))
    curve = [
        {"threshold": f"{gamma:g}", "score": number(score), "chosen": gamma == facts.threshold}
        for gamma, _, score in facts.curve
    ]
    kept = [site for site in facts.sites if site not in facts.agreed]
    return {
        "label": run.label,
        "names": names,
        "tables": [(title, [_shares(facts, site, told[site], names) for site in told]) for title, told in tables],
        "curve": curve,
        "kept": kept,
        "rule": facts.rule,
    }


def _shares(facts: SuperModelFacts, site: str, chosen: dict[str, int], names: Sequence[str]) -> dict[str, Any]:
    cases = sum(chosen.values())
    cells = [f"{chosen.get(name, 0) / cases:.0%}" if cases else MISSING for name in names]
    return {"site": site, "unseen": site not in facts.sites, "cells": cells}


def _unseen(run: Run) -> dict[str, Any]:
    """The scores at hospitals that did not train."""
    metric = run.summary.metric
    tests = {site: result.test or {} for site, result in run.summary.unseen.items()}
    return {"label": run.label, "rows": [(site, number(test.get(metric))) for site, test in tests.items()]}


def _pretrained(facts: dict[str, Any] | None) -> str:
    """On what the weights rest."""
    if facts is None:
        return "No data were shared: the weights rest on the sites' own batch norm, or on none."
    source = "a file at the server" if facts.get("source") == "file" else str(facts.get("data", MISSING))
    start = " The models started from it, too." if facts.get("start") else ""
    return f"The model that measured the sites' data was trained on: {source}.{start}"


def _participation(run: Run) -> dict[str, Any]:
    """Rounds x sites. The reasons stand in the cells and, for paper and screen readers, in a list."""
    absences = run.absences()
    reasons = {(absence.site, absence.round): absence for absence in absences}
    rows: list[dict[str, Any]] = []
    for site in run.sites:
        cells = []
        for line in run.rounds:
            absence = reasons.get((site, line.round))
            kind = absence.kind if absence else "answered" if site in line.answered else "not asked"
            detail = absence.text if absence else kind
            cells.append({"kind": kind.replace(" ", "-"), "mark": MARKS[kind], "text": f"round {line.round}: {detail}"})
        rows.append({"site": site, "cells": cells, "contributed": run.site(site).contributed})
    everyone = bool(rows and run.rounds) and all(cell["kind"] == "answered" for row in rows for cell in row["cells"])
    drawn = bool(run.rounds) and not (everyone and len(run.rounds) > LONG_GRID)
    return {
        "label": run.label,
        "rounds": [{"number": line.round, "phase": line.phase} for line in run.rounds],
        "rows": rows,
        "everyone": everyone,
        # A long grid without a single gap says no more than the sentence above it.
        "drawn": drawn,
        "wide": drawn and len(run.rounds) > LONG_GRID,
        "planned": run.summary.rounds.planned,
        "done": run.summary.rounds.done,
        "absences": _grouped(absences),
        "agreed": _agreed(run),
        "failed": run.failed,
    }


def _grouped(absences: Sequence[Absence]) -> list[dict[str, str]]:
    """One entry per site and reason, so that a site lost for fifty rounds takes one line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for absence in absences:
        groups.setdefault((absence.site, absence.text), []).append(absence.round)
    return [
        {"site": site, "text": text, "rounds": f"Round{'s' if len(rounds) > 1 else ''} {spans(rounds)}"}
        for (site, text), rounds in groups.items()
    ]


def _agreed(run: Run) -> str:
    """What the plan says about taking part."""
    agreed = run.summary.agreed
    if agreed.minimum is None:
        return ""
    policy = f"; when one is missing: {agreed.when_missing}" if agreed.when_missing else ""
    return f"Agreed: at least {agreed.minimum} site{'s' if agreed.minimum != 1 else ''}{policy}."


def _costs(runs: Sequence[Run]) -> dict[str, Any]:
    base = findings.cost_baseline(runs) if len(runs) > 1 else None
    rows = []
    for cost in findings.costs(runs):
        cells = [_cell(cost.total_seconds, _seconds(cost.total_seconds))]
        for field, form in (("seconds", _seconds), ("bytes_up", _bytes), ("bytes_down", _bytes)):
            value, other = getattr(cost, field), getattr(base, field, None)
            ratio = f"×{value / other:.2f}" if value is not None and other else ""
            cells.append(_cell(value, form(value)) | {"ratio": ratio})
        rows.append({"label": cost.label, "cells": cells})
    per_site = [
        {
            "label": run.label,
            "site": site,
            "cells": [
                _cell(run.site(site).seconds, _seconds(run.site(site).seconds)),
                _cell(run.site(site).bytes_up, _bytes(run.site(site).bytes_up)),
                _cell(run.site(site).bytes_down, _bytes(run.site(site).bytes_down)),
            ],
        }
        for run in runs
        for site in run.sites
    ]
    engines = sorted({run.summary.engine or MISSING for run in runs})
    return {"rows": rows, "per_site": per_site, "relative": base is not None, "engines": engines}


def _provenance(runs: Sequence[Run]) -> dict[str, Any]:
    """Facts shared by all runs as a list, those that differ as a table."""
    facts: dict[str, Callable[[Run], str]] = {
        "Status": lambda run: run.summary.status,
        "Task": lambda run: _shown(run.summary.task),
        "Protocol": lambda run: _shown(run.summary.protocol),
        "Seed": lambda run: _shown(run.summary.seed),
        "Network": lambda run: _shown(run.summary.network),
        "Parameters": lambda run: _shown(run.summary.parameters),
        "Rounds": lambda run: f"{run.summary.rounds.done} of {run.summary.rounds.planned}",
        "Model chosen": lambda run: {"mean": "one round for all sites", "site": "per site"}.get(
            run.summary.selected.by or "", _shown(run.summary.selected.by)
        ),
        "Engine": lambda run: _shown(run.summary.engine),
        "Package": lambda run: f"{_shown(run.summary.package.version)} ({_short(run.summary.package.hash)})",
        "Study": lambda run: _shown(run.summary.study),
        "Started": lambda run: _moment(run.summary.started),
        "Ended": lambda run: _moment(run.summary.ended),
        "Plan hash": lambda run: _short(run.summary.plan_hash),
        "Folder": lambda run: run.folder,
    }
    shared = {name: _same(runs, view) for name, view in facts.items()}
    differing = [name for name, value in shared.items() if value is None]
    return {
        "shared": {name: value for name, value in shared.items() if value is not None},
        "differing": differing,
        "rows": [{"label": run.label, "cells": [facts[name](run) for name in differing]} for run in runs],
        "plans": [
            {
                "label": run.label,
                "hash": _shown(run.summary.plan_hash),
                "text": run.plan.rstrip(),
                "record": json.dumps(run.provenance, indent=2, ensure_ascii=False),
            }
            for run in runs
        ],
    }


def _shown(value: str | int | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}".replace(",", " ") if isinstance(value, int) and value > 9999 else str(value)


def _short(digest: str | None) -> str:
    return MISSING if digest is None else digest[:12]


def _moment(text: str | None) -> str:
    if text is None:
        return MISSING
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M:%S}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if value < 600:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _bytes(value: float | None) -> str:
    if value is None:
        return MISSING
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
