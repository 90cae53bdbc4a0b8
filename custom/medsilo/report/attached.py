"""Panels that plug-ins attach to the page of runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medsilo.registry import PANELS
from medsilo.report.read import RunResult
from medsilo.report.template import fill


@dataclass(frozen=True)
class Panel:
    """A section of the page, from a template in the plug-in's own folder. `content` returns its words, or nothing.

    >>> Panel(Path("panel.html"), lambda runs: None).file.name
    'panel.html'
    """

    file: Path
    content: Callable[[Sequence[RunResult]], Mapping[str, Any] | None]

    def drawn(self, runs: Sequence[RunResult]) -> Markup:
        """Return the section, or nothing where the runs tell nothing for it."""
        told = self.content(runs)
        return Markup() if told is None else Markup(fill(self.file.name, "", self.file.parent, **told))


def attached(runs: Sequence[RunResult]) -> list[Markup]:
    """Return the sections of all plug-ins, in the order of their names."""
    panels: list[Panel] = [PANELS[name] for name in PANELS]
    return [panel.drawn(runs) for panel in panels]
