"""A folder of a hospital that one process works in at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from medsilo.core.errors import MedsiloError
from medsilo.core.files import FILE, make_folder


@dataclass(frozen=True)
class LockedFolder:
    """A folder with the lock that all processes of a hospital share."""

    folder: Path
    lock: str  # the file's name
    wait: float  # seconds that another process may hold it
    holds: str  # for people: "this hospital's records"
    unless: str  # what does not happen when the folder cannot be used

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody else in as long as the block runs; raises MedsiloError where that is not to be had."""
        make_folder(self.folder)
        try:
            with FileLock(self.folder / self.lock, timeout=self.wait, mode=FILE):
                yield
        except Timeout as error:
            raise MedsiloError(f"another process holds {self.holds}; end it, or try again") from error
        except OSError as error:
            raise MedsiloError(
                f"{self.holds} cannot be used ({type(error).__name__}), so {self.unless}; see to the folder of "
                "'records'",
                private=f"{self.folder}: {error}",
            ) from error
