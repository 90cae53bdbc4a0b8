"""Give the processes of a simulated job access to the simulator's forked sites (fork_server.py)."""

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvflare_reliability.fork_server import ForkedSite

SITES: dict[str, "ForkedSite"] = {}
begun: Connection | None = None  # in a fork, the connection through which the fork reports that it has started


def died() -> dict[str, str]:
    """Return the simulated sites whose process has died, each with the reason of the death.

    Outside of the simulator, the result is empty, because NVFlare itself reports dead processes.
    """
    return {name: "its process died" for name, own in [*SITES.items()] if own.has_died}


def has_started() -> None:
    """Report to the parent that this forked site has started, so that the next site may start."""
    if begun:
        begun.send_bytes(b"begun")
