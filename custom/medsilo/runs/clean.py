"""Find files that can be deleted from folders of runs: checkpoints of finished studies, and incomplete files."""

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.reading import read_summary

DAY = 86_400.0
OF_SITES = (paths.STATE_FILES, paths.SEALING, paths.SEALED)
OF_UNFINISHED = (*OF_SITES, paths.ANSWER_FILES)
LEFT = "a run that did not end and was left"
# Every folder of a run or comparison contains at least one file or folder with one of these names.
OF_RUNS = {paths.ROUNDS, paths.SUMMARY, paths.CHECKPOINTS, paths.SITES, paths.COMPARISON, paths.VERDICT}
DEPTH, MOST_LOOKED_AT = 4, 20_000  # limits of the search for runs: levels of folders, and number of entries
# temporary names of unfinished files
HALF_WRITTEN = (".*.part", ".part-*")


@dataclass(frozen=True)
class OldFile:
    path: Path
    bytes: int
    why: str
    days: float  # number of days since the file, or the last changed file of the folder, was changed
    stays: str = ""  # name of the one file in the folder that is not deleted with the other files

    @classmethod
    def of(cls, path: Path, why: str, stays: str = "") -> "OldFile":
        """Describe a file or a folder by its size and age. For a folder, the size and age of all files in the folder
        count; symbolic links are not followed.
        """
        within = [Path(place) / name for place, _, names in os.walk(path) for name in names]
        facts = [one.lstat() for one in within if not stays or one != path / stays] or [path.lstat()]
        age = time.time() - max(fact.st_mtime for fact in facts)
        return cls(path, sum(fact.st_size for fact in facts), why, age / DAY, stays)

    def remove(self) -> None:
        evidence = bool(self.stays) and (self.path / self.stays).exists()
        for path in self.path.iterdir() if evidence else [self.path]:
            if evidence and path.name == self.stays:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def find_old(folder: Path, days: float, unfinished: float = math.inf) -> list[OldFile]:
    """Return old incomplete files, and old saved states of ended studies.

    The function never returns models, scores or reports. Files of an unfinished run are returned only if the run's
    folder has been unchanged for several days.
    """
    if not folder.is_dir():
        raise MedsiloError("there is no such folder of runs; give one like runs/", str(folder))
    return [old for old in _candidates(folder, unfinished) if old.days >= days]


def check_holds_runs(folder: Path) -> None:
    """Raise MedsiloError if a folder contains no runs, because a search through a large folder could take minutes.

    The folder to search must contain runs, comparisons or kits. The account's home directory and the parent folders of
    the home directory are rejected.
    """
    remedy = "give the folder of runs, such as runs, or a kit"
    if not folder.is_dir():
        raise MedsiloError("there is no such folder of runs; give one like runs/", str(folder))
    if Path.home().resolve().is_relative_to(folder.resolve()):
        raise MedsiloError(f"{folder} is this account's home, or above it; {remedy}")
    level, left = [folder], MOST_LOOKED_AT
    for _ in range(DEPTH):
        below: list[Path] = []
        for place in level:
            with suppress(OSError), os.scandir(place) as entries:  # an unreadable folder counts as empty
                found = [*islice(entries, left)]
                left -= len(found)
                names = {entry.name for entry in found}
                below += [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
                if names & OF_RUNS or (not names and place == folder):
                    return
                if any(fnmatch(name, pattern) for name in names for pattern in HALF_WRITTEN):
                    return
        level = below
    raise MedsiloError(f"{folder} holds no runs; {remedy}")


def remove(old: Sequence[OldFile]) -> int:
    """Delete files and folders, and return the number of bytes freed."""
    freed = 0
    for one in old:
        try:
            one.remove()
        except OSError as error:
            raise MedsiloError(
                "a file could not be removed; check who owns the file", f"{one.path}: {error}"
            ) from error
        freed += one.bytes
    return freed


def _candidates(folder: Path, unfinished: float) -> Iterator[OldFile]:
    for place, _, names in os.walk(folder):
        here = Path(place)
        for name in sorted(names):
            path = here / name
            if (why := _why(here, name, unfinished)) and path.is_file() and not path.is_symlink():
                yield OldFile.of(path, why)


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
    return days < math.inf and OldFile.of(run, "").days >= days


def _has_ended(site: Path) -> bool:
    """Return True if a study has ended at a site, because the run has a final summary or because the hospital has
    tested the model.
    """
    run = site.parents[1]
    if (run / paths.SUMMARY).exists() or (run / paths.PLAN).exists():
        return is_finished(run)
    return (site / paths.CASES).exists() and (site / paths.LAST).exists()


def is_finished(run: Path) -> bool:
    try:
        return read_summary(run).finished
    except MedsiloError:  # a run whose summary is missing or damaged is not removable
        return False
