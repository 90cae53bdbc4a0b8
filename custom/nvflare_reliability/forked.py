"""What a job's processes need to know of the simulator's forks (fork_server.py); elsewhere there are none."""

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvflare_reliability.fork_server import ForkedSite

SITES: dict[str, "ForkedSite"] = {}  # as they were started last
begun: Connection | None = None  # of a fork


def died() -> dict[str, str]:
    """Return the simulated sites whose process has died, and that it did; in a federation of machines NVFlare tells."""
    return {name: "its process died" for name, own in [*SITES.items()] if own.has_died}


def has_started() -> None:
    """Let the next one start, if this process is a fork."""
    if begun:
        begun.send_bytes(b"begun")
