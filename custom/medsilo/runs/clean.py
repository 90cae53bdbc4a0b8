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
# Folders of runs and comparisons contain at least one of these names
OF_RUNS = {paths.ROUNDS, paths.SUMMARY, paths.CHECKPOINTS, paths.SITES, paths.COMPARISON, paths.VERDICT}
# Limits on the search for runs: levels of subfolders, and number of files and folders
DEPTH, MOST_LOOKED_AT = 4, 20_000
# temporary names of unfinished files
HALF_WRITTEN = (".*.part", ".part-*")


@dataclass(frozen=True)
class OldFile:
    path: Path
    bytes: int
    why: str
    days: float  # days since the file, or the newest file in the folder, was changed
    stays: str = ""  # name of the file that stays when the rest of the folder is deleted

    @classmethod
    def of(cls, path: Path, reason: str, stays: str = "") -> "OldFile":
        """Return the size and age of a file, or of a folder with all its files; symbolic links are not followed."""
        within = [Path(place) / name for place, _, names in os.walk(path) for name in names]
        facts = [one.lstat() for one in within if not stays or one != path / stays] or [path.lstat()]
        age = time.time() - max(fact.st_mtime for fact in facts)
        return cls(path, sum(fact.st_size for fact in facts), reason, age / DAY, stays)

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
    """Return incomplete files, and saved states of finished studies, that are at least `days` old.

    The function never returns models, scores or reports. It returns the saved states of an unfinished run only if the
    run's folder has not changed for `unfinished` days.
    """
    if not folder.is_dir():
        raise MedsiloError("there is no such folder of runs; give one like runs/", str(folder))
    return [old for old in _candidates(folder, unfinished) if old.days >= days]


def check_holds_runs(folder: Path) -> None:
    """Raise MedsiloError unless a folder contains runs or comparisons, because searching any large folder could take
    minutes.

    The account's home folder, and the folders above it, are rejected, too.
    """
    remedy = "give the folder of runs, such as runs, or a kit"
    if not folder.is_dir():
        raise MedsiloError("there is no such folder of runs; give one like runs/", str(folder))
    if Path.home().resolve().is_relative_to(folder.resolve()):
        raise MedsiloError(f"{folder} is this account's home folder, or a folder above it; {remedy}")
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
    raise MedsiloError(f"{folder} contains no runs; {remedy}")


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


def _why(folder: Path, name: str, unfinished: float) -> str:
    if any(fnmatch(name, pattern) for pattern in HALF_WRITTEN):
        return "half-written"
    run = folder.parent
    if run / paths.CHECKPOINTS == folder and name.endswith(".safetensors"):
        if is_finished(run):
            return "checkpoint of a finished run"
        return f"checkpoint of {LEFT}" if is_left(run, unfinished) else ""
    if folder.parent.name == paths.SITES and any(fnmatch(name, own) for own in OF_UNFINISHED):
        if _has_ended(folder):
            return "a site's state in a finished run" if any(fnmatch(name, own) for own in OF_SITES) else ""
        return f"a site's state in {LEFT}" if is_left(folder.parents[1], unfinished) else ""
    return ""


def is_left(run: Path, days: float) -> bool:
    return days < math.inf and OldFile.of(run, "").days >= days


def _has_ended(site: Path) -> bool:
    """Return True if a study has ended at a site: the run is finished, or a hospital has tested the model."""
    run = site.parents[1]
    if (run / paths.SUMMARY).exists() or (run / paths.PLAN).exists():
        return is_finished(run)
    return (site / paths.CASES).exists() and (site / paths.LAST).exists()


def is_finished(run: Path) -> bool:
    try:
        return read_summary(run).finished
    except MedsiloError:  # a run with a missing or damaged summary counts as unfinished
        return False
