"""Find what may go from folders of runs: states of studies that have ended, and what was half-written."""

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.reading import read_summary

DAY = 86_400.0  # seconds
OF_SITES = (paths.STATE_FILES, paths.SEALING, paths.SEALED)
OF_UNFINISHED = (*OF_SITES, paths.ANSWER_FILES)
LEFT = "a run that did not end and was left"
HALF_WRITTEN = (".*.part", ".part-*")  # by write_text and its kin, and by 'medsilo predict'


@dataclass(frozen=True)
class Old:
    """A file or folder that nobody needs any more."""

    path: Path
    bytes: int
    why: str
    days: float  # since it was last changed
    stays: str = ""  # a file right in the folder that is evidence, and with it the folder

    @classmethod
    def of(cls, path: Path, why: str, stays: str = "") -> "Old":
        """Return a file, or a folder with the files in it. Links are not followed."""
        within = [Path(place) / name for place, _, names in os.walk(path) for name in names]
        facts = [one.lstat() for one in within if not stays or one != path / stays] or [path.lstat()]
        age = time.time() - max(fact.st_mtime for fact in facts)
        return cls(path, sum(fact.st_size for fact in facts), why, age / DAY, stays)

    def remove(self) -> None:
        """Delete it, but for the file that stays."""
        evidence = bool(self.stays) and (self.path / self.stays).exists()
        for path in self.path.iterdir() if evidence else [self.path]:
            if evidence and path.name == self.stays:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def find_old(folder: Path, days: float, unfinished: float = math.inf) -> list[Old]:
    """Return the files below a folder that were needed to go on with a study, or half-written, so many days ago.

    Models, scores and reports stay, and all that an unfinished run needs, unless it was left for `unfinished` days.
    Links are not followed.
    """
    if not folder.is_dir():
        raise MedsiloError("there is no such folder of runs; give one like runs/", str(folder))
    return [old for old in _candidates(folder, unfinished) if old.days >= days]


def remove(old: Sequence[Old]) -> int:
    """Delete these files; returns the bytes that became free."""
    freed = 0
    for one in old:
        try:
            one.remove()
        except OSError as error:
            raise MedsiloError("a file could not be removed; check whose it is", f"{one.path}: {error}") from error
        freed += one.bytes
    return freed


def _candidates(folder: Path, unfinished: float) -> Iterator[Old]:
    for place, _, names in os.walk(folder):
        here = Path(place)
        for name in sorted(names):
            path = here / name
            if (why := _why(here, name, unfinished)) and path.is_file() and not path.is_symlink():
                yield Old.of(path, why)


def _why(here: Path, name: str, unfinished: float) -> str:
    if any(fnmatch(name, pattern) for pattern in HALF_WRITTEN):
        return "half-written"
    run = here.parent
    if run / paths.CHECKPOINTS == here and name.endswith(".safetensors"):
        if is_finished(run):
            return "checkpoint of a finished run"
        return f"checkpoint of {LEFT}" if is_left(run, unfinished) else ""
    if here.parent.name == paths.SITES and any(fnmatch(name, own) for own in OF_UNFINISHED):
        if _has_ended(here):
            return "a site's state in a finished run" if any(fnmatch(name, own) for own in OF_SITES) else ""
        return f"a site's state in {LEFT}" if is_left(here.parents[1], unfinished) else ""
    return ""


def is_left(run: Path, days: float) -> bool:
    """Return whether nothing in a run's folder was changed for so many days."""
    return days < math.inf and Old.of(run, "").days >= days


def _has_ended(site: Path) -> bool:
    """Return whether a site's part of a study is over: by its summary, or at a hospital by the test, which is last."""
    run = site.parents[1]
    if (run / paths.SUMMARY).exists() or (run / paths.PLAN).exists():
        return is_finished(run)
    return (site / paths.CASES).exists() and (site / paths.LAST).exists()


def is_finished(run: Path) -> bool:
    """Return whether a run has ended well."""
    try:
        return read_summary(run).finished
    except MedsiloError:  # none, or damaged: nothing is known of it, so nothing goes
        return False
