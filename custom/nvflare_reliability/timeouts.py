"""Compute NVFlare's time limits from a study's settings, so that slow or broken connections do not end a job."""

from dataclasses import dataclass
from typing import Literal

PIECE_SECONDS = 10.0  # seconds for a piece of a tensor on the slowest connection
LARGEST_PIECE = 16 << 20  # maximum bytes of a piece of a tensor
SMALLEST_PIECE = 1 << 14
PIECE = 1 << 20  # bytes of a piece of a tensor if the connection's speed is measured
ASK_AGAIN = 30.0  # seconds after which a reply counts as late on any connection
# default for the seconds that a connection may be lost: twice the longest interruption that hospitals reported
DOWN = 1200.0
LONGEST = 86_400.0  # maximum seconds for one answer of a site that still sends messages


@dataclass(frozen=True)
class Timeouts:
    """The time limits and transfer sizes that a study allows a site."""

    silence: float  # maximum seconds of silence
    rate: float | None = None  # bytes per second of the slowest connection; None if the speed is measured
    again: float = ASK_AGAIN  # seconds after which a reply that has not begun counts as late
    away: float = 0.0  # seconds that a round waits for a site that lost its connection

    @property
    def piece(self) -> int:
        """The maximum bytes of a piece of a tensor. Pieces that have arrived survive a broken connection."""
        if self.rate is None:
            return PIECE
        return min(LARGEST_PIECE, max(SMALLEST_PIECE, int(PIECE_SECONDS * self.rate)))


def limits(timeouts: Timeouts, side: Literal["server", "site"]) -> dict[str, float]:
    """Return NVFlare's time limits and sizes for the server's or a site's configuration of a job."""
    held = {"tensor_download_chunk_size": timeouts.piece, "streaming_idle_timeout": max(600.0, 2.0 * timeouts.silence)}
    if side == "site":
        return held | {"max_runner_sync_timeout": max(60.0, timeouts.silence)}
    return held | {"dead_client_grace_period": max(60.0, timeouts.silence, timeouts.away)}
