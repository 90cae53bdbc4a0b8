"""Read the state of a study at this hospital from local files: activity, rounds, disclosures, and the reason why the
study ended.
"""

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
from medsilo.runs.own_files import LogEntry, SiteActivity, Spent, Weighed
from medsilo.runs.progress import read_now
from medsilo.runs.reading import read_of_sites

Row = dict[str, str]


@dataclass(frozen=True)
class StudyMoment:
    name: str
    diary: tuple[LogEntry, ...]
    rows: tuple[Row, ...]
    doing: SiteActivity | None
    spent: Spent | None
    weighed: Weighed | None

    @classmethod
    def read(cls, output: Path, name: str, site: str) -> "StudyMoment | None":
        if not is_safe_name(name):
            return None
        folder = paths.site_folder(output / name, site)
        if not folder.is_dir():
            return None
        diary, spent = tuple(read_diary(folder)), read_of_sites(Spent, output / name, paths.SPENT).get(site)
        weighed = read_of_sites(Weighed, output / name, paths.WEIGHT).get(site)
        return cls(name, diary, tuple(_rows(folder)), read_now(SiteActivity, folder), spent, weighed)

    @cached_property
    def began(self) -> LogEntry | None:
        """The log entry of the last start of the study's process; the entry contains the hash of the plan."""
        return next((line for line in reversed(self.diary) if line.kind == "began"), None)

    @property
    def ended(self) -> str:
        """A sentence that describes how the study ended at this site, or an empty text if the study has not ended."""
        last = (self.diary[-1].kind, self.diary[-1].task) if self.diary else ("", "")
        early = "The study has ended here before its last task, and its lead can read why"
        return {("answered", "test"): "The study has ended here", ("ended", ""): early}.get(last, "")

    @property
    def stopped(self) -> LogEntry | None:
        """The last log entry if it reports a rejection or a dead process, after which the site sends no more answers;
        otherwise None.
        """
        last = next((line for line in reversed(self.diary) if line.kind != "ended"), None)
        return last if last and last.kind in ("refused", "died") and self.work is None else None

    @property
    def work(self) -> SiteActivity | None:
        since = self.diary[-1].at if self.diary else 0.0
        return self.doing if self.doing and self.doing.at > since else None

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.diary)

    @property
    def round(self) -> int:
        return max((line.round for line in self.diary if line.kind == "answered" and line.task == "round"), default=0)

    @property
    def last(self) -> float:
        return max([0.0, *(line.at for line in self.diary[-1:]), *([self.doing.at] if self.doing else [])])

    def seconds_left(self) -> float | None:
        """Return the estimated number of seconds until the last round ends, or None if no estimate is possible."""
        ends = [line.at for line in self.diary if line.kind == "answered" and line.task == "round"]
        if self.began is None or len(ends) < 2 or self.ended:
            return None
        pace = median(later - earlier for earlier, later in pairwise(ends))
        return max(0.0, pace * (self.began.rounds - self.round) - (time.time() - ends[-1]))


def studies(output: Path, site: str) -> list[StudyMoment]:
    names = (path.name for path in output.glob("*") if path.name not in (paths.HOSPITAL, paths.MODELS))
    found = (StudyMoment.read(output, name, site) for name in names)
    return sorted((one for one in found if one), key=lambda one: (-one.last, one.name))


def _rows(folder: Path) -> Iterator[Row]:
    try:
        with (folder / paths.METRICS).open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
    except (OSError, ValueError, csv.Error):
        return


def read_diary(site: Path) -> list[LogEntry]:
    try:
        lines = (site / paths.DIARY).read_text("utf-8", "replace").split("\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(LogEntry.model_validate_json(line))
    return found
