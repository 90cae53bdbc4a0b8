"""events.log of a server's or a hospital's kit: who came and went, how studies began and ended, and why.

Several processes of a kit write it, one at a time. A line has columns, with tabs between them: when, level, what,
who, study, job, text.
"""

import logging
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from medsilo.core.files import FILE
from medsilo.core.text import plain

NAME = "events.log"
LARGEST, KEPT = 1 << 20, 4  # bytes of the file until it is set aside, and how many of these are kept
WAIT = 5.0  # seconds that an event waits for other processes of the kit
TEXT = 500  # bytes of a reason
SILENCE = 90.0  # seconds without a heartbeat until a hospital is away, whatever its connection
What = Literal["started", "joined", "away", "back", "refused", "began", "resumed", "waits", "ended", "failed"]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """What happened, to whom (or to this party), in which study. needs_somebody: it does not mend itself."""

    what: What
    text: str
    who: str = ""
    study: str = ""
    job: str = ""
    needs_somebody: bool = False

    def line(self, at: float | None = None) -> str:
        """Return the event as a line of the file."""
        moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
        level = "WARNING" if self.needs_somebody else "INFO"
        of = (plain(name, 80) or "-" for name in (self.who, self.study, self.job))
        return "\t".join((f"{moment:%Y-%m-%d %H:%M:%SZ}", level, self.what, *of, plain(self.text, TEXT)))


def write(kit: Path, event: Event) -> None:
    """Add an event to a kit's file. The work goes on when it can't be written."""
    try:
        with FileLock(kit / f".{NAME}.lock", timeout=WAIT, mode=FILE):
            file = _Rolling(kit / NAME, maxBytes=LARGEST, backupCount=KEPT, encoding="utf-8")
            try:
                file.emit(logging.makeLogRecord({"msg": event.line()}))
            finally:
                file.close()
    except (OSError, Timeout) as error:
        LOG.warning("%s can't be written (%s): %s", NAME, type(error).__name__, event.text)


class _Rolling(RotatingFileHandler):
    def _open(self):
        return os.fdopen(
            os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE), "a", encoding="utf-8"
        )

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # the exception that is being handled: `write` says it in one line
