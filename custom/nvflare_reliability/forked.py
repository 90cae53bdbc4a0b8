"""What a job's processes need to know of the simulator's forks (fork_server.py); elsewhere there are none."""

from multiprocessing.connection import Connection
from typing import Protocol


class Forked(Protocol):
    """A process of a simulated site."""

    @property
    def has_died(self) -> bool:
        """Return whether nothing more can come of the site."""


SITES: dict[str, Forked] = {}  # as they were started last
begun: Connection | None = None  # of a fork


def died() -> dict[str, str]:
    """Return the simulated sites whose process has died, and that it did; in a federation of machines NVFlare tells."""
    return {name: "its process died" for name, own in [*SITES.items()] if own.has_died}


def has_started() -> None:
    """Let the next one start, if this process is a fork."""
    if begun:
        begun.send_bytes(b"begun")
