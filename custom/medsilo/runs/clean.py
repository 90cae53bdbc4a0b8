"""Find what may go from folders of runs: states of studies that have ended, and what was half-written."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.reading import read_summary

DAY = 86_400.0  # seconds
OF_SITES = (paths.STATE_FILES, paths.SEALING_FILES, paths.SEALED)
HALF_WRITTEN = (".*.part", ".part-*")  # by write_text and its kin, and by 'medsilo predict'


@dataclass(frozen=True)
class Old:
    """A file that nobody needs any more."""

    path: Path
    bytes: int
    why: str


def find_old(folder: Path, days: float) -> list[Old]:
    """Return the files below a folder that were needed to go on with a study, or half-written, so many days ago.

    Models, scores, reports and all that an unfinished run needs stay. Links are not followed.
    """
    if not folder.is_dir():
        raise MedsiloError("there is no such folder of runs; give one like runs/", str(folder))
    newest = time.time() - days * DAY
    return [old for old in _candidates(folder) if old.path.lstat().st_mtime <= newest]


def remove(old: Sequence[Old]) -> int:
    """Delete these files; returns the bytes that became free."""
    freed = 0
    for one in old:
        try:
            one.path.unlink()
        except OSError as error:
            raise MedsiloError("a file could not be removed; check whose it is", f"{one.path}: {error}") from error
        freed += one.bytes
    return freed


def _candidates(folder: Path) -> Iterator[Old]:
    for place, _, names in os.walk(folder):
        here = Path(place)
        for name in sorted(names):
            why = _why(here, name)
            path = here / name
            if why and path.is_file() and not path.is_symlink():
                yield Old(path, path.stat().st_size, why)


def _why(here: Path, name: str) -> str:
    if any(fnmatch(name, pattern) for pattern in HALF_WRITTEN):
        return "half-written"
    if here.name == paths.CHECKPOINTS and name.endswith(".safetensors") and _is_finished(here.parent):
        return "checkpoint of a finished run"
    ended = here.parent.name == paths.SITES and any(fnmatch(name, own) for own in OF_SITES)
    if ended and _has_ended(here):
        return "a site's state in a finished run"
    return ""


def _has_ended(site: Path) -> bool:
    """Return whether a site's part of a study is over: by its summary, or at a hospital by the test, which is last."""
    run = site.parents[1]
    if (run / paths.SUMMARY).exists() or (run / paths.PLAN).exists():
        return _is_finished(run)
    return (site / paths.CASES).exists() and (site / paths.LAST).exists()


def _is_finished(run: Path) -> bool:
    try:
        return read_summary(run).finished
    except MedsiloError:  # none, or damaged: nothing is known of it, so nothing goes
        return False
