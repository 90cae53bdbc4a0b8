"""The messages of hospitals and server about a promise, typed and bounded; a summary's part about it, and its panel."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from medsilo.extend import Refused, Section
from medsilo_promise.risks import CUTS, TEMPERATURES

Rule = Literal["shrunk", "pooled", "local"]
RULES: tuple[Rule, ...] = get_args(Rule)
MOST_STRENGTH = 2500.0
PANEL = Path(__file__).parent / "panel.html"
Share = Annotated[float, Field(ge=0, le=1)]
Patients = Annotated[int, Field(ge=0, le=10_000_000)]
Curve = Annotated[list[Share], Field(min_length=CUTS, max_length=CUTS)]
Place = Annotated[int, Field(ge=0, lt=CUTS - 1)] | None


class ToldCurve(Section):
    """A site's word on a group's validation cases: patients, and the mean of what they lose at each cut."""

    patients: Patients
    risks: Curve


class ToldOfOthers(Section):
    """The server's word to a site on a group: κ and mean risks of the others, and the cut of all patients together."""

    strength: Annotated[float, Field(ge=0, le=MOST_STRENGTH)]
    means: Curve
    pooled: Place


class KeptCuts(Section):
    """promise.json, which goes with a model: the promise, and by group the cut of each rule."""

    promise: dict[str, Any]
    cuts: dict[Annotated[str, Field(max_length=200)], dict[Rule, Place]]


class Kept(Section):
    """A rule's result at the test cases of a group: mean loss and size; no promise where there is no cut."""

    promised: bool
    lost: Share | None
    size: Annotated[float, Field(ge=0, le=1e3)] | None


class ToldTest(Section):
    """A site's word on a group's test cases."""

    calibrated: Patients
    patients: Patients
    rules: dict[Rule, Kept]


class Told(Section):
    """A site's word, by group; of a classification the temperature, or the calibration error without and with."""

    curves: dict[str, ToldCurve] = {}
    tests: dict[str, ToldTest] = {}
    temperature: Annotated[int, Field(ge=0, lt=len(TEMPERATURES))] | None = None
    errors: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = None


class Shown(Section):
    """A summary's part about a promise."""

    level: float
    confidence: float | None
    rule: str
    says: str
    sized: str
    needed: int
    strength: dict[str, float]
    sites: dict[str, dict[str, ToldTest]]
    temperatures: dict[str, float]
    errors: dict[str, list[float]]


def panel_of(runs: Sequence[Any]) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the panel's template and words; a summary that tells anything else of a promise is not shown."""
    parts = []
    for run in runs:
        try:
            told = Shown.received((run.summary.details.model_extra or {}).get("promise"))
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
    return (PANEL, {"parts": parts, "rules": RULES}) if parts else None


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
