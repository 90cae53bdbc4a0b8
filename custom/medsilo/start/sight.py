"""Say what lies in a folder, images or recordings, and what suits it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medsilo.start.advice import found_lines
from medsilo.start.choices import Draft, choose
from medsilo.start.fitting import Machine
from medsilo.start.folder_layout import layout_of_folder
from medsilo.start.looks import look_at
from medsilo.start.time_series import choose_series, look_at_series, recordings_in


@dataclass(frozen=True)
class Sight:
    """Findings, one sentence a line, and the choices that follow."""

    found: list[str]
    several: bool  # whether the folder has several hospitals
    choices: Draft


def first_sight(folder: Path, site: str, machine: Callable[[], Machine], device: str | None) -> Sight:
    """Open some of a folder's files, and choose. site: this hospital's name, where the folder is one hospital's."""
    if folder.is_dir() and (names := recordings_in(folder)):
        series = look_at_series(folder, names)
        choices = choose_series(series, series.hospitals or (site,), device)
        return Sight(series.found, bool(series.hospitals), choices)
    looks = look_at(folder, layout_of_folder(folder))
    choices = choose(looks, looks.layout.hospitals or (site,), machine(), device)
    return Sight(found_lines(looks), bool(looks.layout.hospitals), choices)
