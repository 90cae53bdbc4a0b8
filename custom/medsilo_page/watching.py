"""A study at this hospital as its own files tell it: what goes on, its rounds, what has left, why it stopped."""

import csv
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median

from medsilo.core.text import is_safe_name
from medsilo.runs import paths
from medsilo.runs.own_files import LogEntry, SiteActivity, Spent
from medsilo.runs.progress import read_now
from medsilo.runs.reading import read_of_sites

Row = dict[str, str]  # a line of metrics.csv


@dataclass(frozen=True)
class StudyMoment:
    """A study at one moment."""

    name: str
    diary: tuple[LogEntry, ...]
    rows: tuple[Row, ...]
    doing: SiteActivity | None
    spent: Spent | None

    @classmethod
    def read(cls, output: Path, name: str, site: str) -> "StudyMoment | None":
        """Read a study of this site; None where there is none of this name."""
        if not is_safe_name(name):
            return None
        folder = paths.site_folder(output / name, site)
        if not folder.is_dir():
            return None
        diary, spent = tuple(read_diary(folder)), read_of_sites(Spent, output / name, paths.SPENT).get(site)
        return cls(name, diary, tuple(_rows(folder)), read_now(SiteActivity, folder), spent)

    @cached_property
    def began(self) -> LogEntry | None:
        """Return the last beginning of a process, which says which plan runs."""
        return next((line for line in reversed(self.diary) if line.kind == "began"), None)

    @property
    def ended(self) -> str:
        """Return how the study has ended here; nothing while it goes on."""
        last = (self.diary[-1].kind, self.diary[-1].task) if self.diary else ("", "")
        early = "The study has ended here before its last task, and its lead can read why"
        return {("answered", "test"): "The study has ended here", ("ended", ""): early}.get(last, "")

    @property
    def stopped(self) -> LogEntry | None:
        """Return why nothing leaves, where the last thing was a refusal or a death."""
        last = next((line for line in reversed(self.diary) if line.kind != "ended"), None)
        return last if last and last.kind in ("refused", "died") and self.work is None else None

    @property
    def work(self) -> SiteActivity | None:
        """Return the work that goes on: what was told of it since the last answer or refusal."""
        since = self.diary[-1].at if self.diary else 0.0
        return self.doing if self.doing and self.doing.at > since else None

    @property
    def bytes(self) -> int:
        """Return how much has left."""
        return sum(line.bytes for line in self.diary)

    @property
    def round(self) -> int:
        """Return the last round that was answered."""
        return max((line.round for line in self.diary if line.kind == "answered" and line.task == "round"), default=0)

    @property
    def last(self) -> float:
        """Return when the study was last heard of, in seconds since 1970."""
        return max([0.0, *(line.at for line in self.diary[-1:]), *([self.doing.at] if self.doing else [])])

    def seconds_left(self) -> float | None:
        """Return the seconds that the remaining rounds take at the pace so far; None where it is not known."""
        ends = [line.at for line in self.diary if line.kind == "answered" and line.task == "round"]
        if self.began is None or len(ends) < 2 or self.ended:
            return None
        pace = median(later - earlier for earlier, later in pairwise(ends))
        return max(0.0, pace * (self.began.rounds - self.round) - (time.time() - ends[-1]))


def studies(output: Path, site: str) -> list[StudyMoment]:
    """Return the studies of this site, the last one first."""
    names = (path.name for path in output.glob("*") if path.name not in (paths.HOSPITAL, paths.MODELS))
    found = (StudyMoment.read(output, name, site) for name in names)
    return sorted((one for one in found if one), key=lambda one: (-one.last, one.name))


def _rows(folder: Path) -> Iterator[Row]:
    """Yield the lines of metrics.csv, which is written whole."""
    try:
        with (folder / paths.METRICS).open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
    except (OSError, ValueError, csv.Error):
        return


def read_diary(site: Path) -> list[LogEntry]:
    """Read what left a site whose folder is here, and what did not; a line that can't be read is passed over."""
    try:
        lines = (site / paths.DIARY).read_text("utf-8", "replace").split("\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(LogEntry.model_validate_json(line))
    return found
