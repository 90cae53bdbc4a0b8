"""The page's panel: what was promised and found at each hospital, calibration, and decision curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medsilo.extend import Refused
from medsilo_promise.told import RULES, Kept, Shown

FILE = Path(__file__).parent / "panel.html"
CHANCES = tuple(tenth / 10 for tenth in range(1, 10))


def panel_of(runs: Sequence[Any]) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the panel's template and words; a summary that tells anything else of a promise is not shown."""
    parts = []
    for run in runs:
        try:
            told = Shown.read((run.summary.details.model_extra or {}).get("promise"))
        except Refused:
            continue
        parts.append(
            {
                "label": run.label,
                "told": told,
                "rows": list(_rows(told)),
                "errors": [(site, told.temperatures.get(site), *error) for site, error in told.errors.items()],
                "benefits": list(_benefits(run)),
            }
        )
    return (FILE, {"parts": parts, "chances": CHANCES, "rules": RULES}) if parts else None


def _rows(told: Shown) -> Any:
    for site, groups in told.sites.items():
        for group, own in groups.items():
            name = site if group == "all" else f"{site}, {group}"
            cells = [_cell(own.rules.get(rule), own.patients, told) for rule in RULES]  # type: ignore[call-overload]
            yield name, own.calibrated, own.patients, cells


def _cell(kept: Kept | None, patients: int, told: Shown) -> dict[str, str]:
    if kept is None or kept.lost is None or kept.size is None:
        return {"text": f"no promise: {told.needed} patients are needed", "size": ""}
    broken = kept.lost > 1 - told.level + 1e-9
    chance = 2 * (kept.lost * (1 - kept.lost) / max(patients, 1)) ** 0.5
    verdict = "kept" if not broken else "above, by chance" if kept.lost - chance <= 1 - told.level else "broken"
    return {"text": f"{kept.lost:.3f} lost: {verdict}", "size": f"{kept.size:.2f}"}


def _benefits(run: Any) -> Any:
    """Yield each hospital's net benefit by threshold: true positives less weighed false ones, per case; and that of
    calling every case found (Vickers and Elkin 2006)."""
    for site in run.sites:
        decisions = run.site(site).decisions
        if decisions is None or decisions.reliability is None or len(decisions.confusion) != 2:
            continue
        places = decisions.reliability[0]
        everyone, having = sum(place[0] for place in places), sum(place[1] for place in places)
        lines = []
        for first, chance in enumerate(CHANCES, 1):
            called, right = (sum(place[kind] for place in places[first:]) for kind in (0, 1))
            odds = chance / (1 - chance)
            model = (right - (called - right) * odds) / max(everyone, 1)
            lines.append((model, (having - (everyone - having) * odds) / max(everyone, 1)))
        yield site, lines
