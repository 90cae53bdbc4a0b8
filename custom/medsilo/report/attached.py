"""Sections of the page of runs that layers of the plans attach."""

from collections.abc import Sequence

from markupsafe import Markup

from medsilo.registry import LAYERS
from medsilo.report.read import RunResult
from medsilo.report.template import fill


def attached(runs: Sequence[RunResult]) -> list[Markup]:
    """Return the sections of all layers that concluded something in one of these runs, in the order of their names."""
    told = {name for run in runs for name in run.summary.details.model_extra or {} if name in LAYERS}
    panels = [LAYERS[name].panel(runs) for name in sorted(told)]
    return [Markup(fill(file.name, "", file.parent, **words)) for file, words in filter(None, panels)]
