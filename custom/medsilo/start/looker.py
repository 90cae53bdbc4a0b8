"""Say what lies in a folder, and what suits it: the first looker that knows the folder does."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medsilo.core.errors import DataError
from medsilo.registry import LOOKERS
from medsilo.start.choices import Draft
from medsilo.start.fitting import Machine


@dataclass(frozen=True)
class Sight:
    """Findings, one sentence a line, and the choices that follow.

    >>> Sight(["40 photographs"], several=False, choices=None).found
    ['40 photographs']
    """

    found: list[str]
    several: bool  # whether the folder has several hospitals
    choices: Draft


@dataclass(frozen=True)
class Folder:
    """A folder that `medsilo init` is to look at.

    >>> from pathlib import Path
    >>> Folder(Path("/data/kidney"), "st-anna", lambda: None, "cpu").site
    'st-anna'
    """

    path: Path
    site: str  # this hospital's name, where the folder is one hospital's
    machine: Callable[[], Machine]
    device: str | None  # one that was asked for


@dataclass(frozen=True)
class Looker:
    """Knows one kind of folder. It is an entry point `medsilo.lookers`; that of images is asked last.

    >>> from medsilo.extend import Looker
    >>> Looker(lambda folder: None).look(None) is None
    True
    """

    look: Callable[[Folder], Sight | None]  # opens some files and chooses; None for a folder of another kind


def first_sight(folder: Folder) -> Sight:
    """Open some of a folder's files, and choose."""
    for name in sorted(LOOKERS, key=lambda name: name == "images"):
        looker: Looker = LOOKERS[name]
        if (sight := looker.look(folder)) is not None:
            return sight
    raise DataError("no plug-in knows this folder; install medsilo again, whose own looker of images is missing")
