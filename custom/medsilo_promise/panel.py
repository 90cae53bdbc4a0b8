"""The page's panel: what was promised and found at each hospital, and calibration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medsilo.extend import Refused
from medsilo_promise.told import RULES, Kept, Shown

FILE = Path(__file__).parent / "panel.html"


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
            }
        )
    return (FILE, {"parts": parts, "rules": RULES}) if parts else None


def _rows(told: Shown) -> Any:
    for site, groups in told.sites.items():
        for group, own in groups.items():
            name = site if group == "all" else f"{site}, {group}"
            cells = [_cell(own.rules.get(rule), own.patients, told) for rule in RULES]
            yield name, own.calibrated, own.patients, cells


def _cell(kept: Kept | None, patients: int, told: Shown) -> dict[str, str]:
    if kept is None or kept.lost is None or kept.size is None:
        return {"text": f"no promise: {told.needed} patients are needed", "size": ""}
    broken = kept.lost > 1 - told.level + 1e-9
    chance = 2 * (kept.lost * (1 - kept.lost) / max(patients, 1)) ** 0.5
    verdict = "kept" if not broken else "above, by chance" if kept.lost - chance <= 1 - told.level else "broken"
    return {"text": f"{kept.lost:.3f} lost: {verdict}", "size": f"{kept.size:.2f}"}
