"""Give a job's processes access to the simulator's forked sites (fork_server.py)."""

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvflare_reliability.fork_server import ForkedSite

SITES: dict[str, "ForkedSite"] = {}  # latest process of each site
begun: Connection | None = None  # in a fork, the connection to the parent process


def died() -> dict[str, str]:
    """Return the simulated sites whose process has died, each with the reason. On separate machines, NVFlare reports
    dead processes itself.
    """
    return {name: "its process died" for name, own in [*SITES.items()] if own.has_died}


def has_started() -> None:
    """Report to the parent that this forked site has started, so that the next site may start."""
    if begun:
        begun.send_bytes(b"begun")
