"""Keep a page about a study up to date while it goes on."""

import time
from collections.abc import Callable
from pathlib import Path

from medsilo.runs import paths
from medsilo.study.progress import StudyProgress

EVERY = 1.0  # seconds between two pages inside a round


class LivePage:
    """A page about a study that goes on: a table of sites, and the curves so far."""

    def __init__(self, progress: StudyProgress, page: Path, title: str, say: Callable[[str], None]) -> None:
        self.progress, self.page, self.title, self.say = progress, page, title, say
        self._written, self._done = 0.0, -1

    def renew(self) -> None:
        """Write the page after a round, and every second inside one."""
        if self.progress.done == self._done and time.monotonic() - self._written < EVERY:
            return
        if not self._written:
            self.say(f"live page: {self.page}")
        self._done = self.progress.done
        self.write()
        self._written = time.monotonic()

    def write(self, ended: str = "") -> None:
        """Write the page. ended: a sentence that says so; a browser does not renew the page then."""
        from medsilo.report.live_page import write_live

        write_live(self.progress, self.page, self.title, ended)


class LiveReport(LivePage):
    """The page of a run on this machine, in the place of its report until there is one."""

    def __init__(self, progress: StudyProgress, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(progress, folder / paths.REPORT, folder.resolve().name, say)
        self.folder = folder
        self._outcome_before = self._outcome()  # of a run that goes on

    def _outcome(self) -> int | None:
        path = self.folder / paths.SUMMARY
        return path.stat().st_mtime_ns if path.exists() else None

    def renew(self) -> None:
        """Write the page as soon as the run has a folder, and until it has an outcome."""
        ended = self._outcome() not in (None, self._outcome_before)
        if (self.folder / paths.PLAN).exists() and not ended:
            super().renew()

    def stop(self) -> None:
        """Write the page of a run that ended badly: the report of what there is, or else how it stood."""
        from medsilo.core.errors import MedsiloError
        from medsilo.report.page import write

        if not self._written:
            return
        try:
            write([self.folder], self.page, self.title)
        except MedsiloError:  # it has no summary
            self.write("The study was stopped.")
