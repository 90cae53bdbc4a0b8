"""Compute NVFlare's time limits from the settings of a study, so that no slow or broken connection ends a job."""

from dataclasses import dataclass
from typing import Literal

PIECE_SECONDS = 10.0  # maximum seconds for the transfer of one piece of a tensor over the slowest connection
LARGEST_PIECE = 16 << 20  # maximum bytes of a piece of a tensor
SMALLEST_PIECE = 1 << 14
PIECE = 1 << 20  # bytes of a piece of a tensor if the speed of the connection is not set but measured
ASK_AGAIN = 30.0  # seconds after which a missing reply counts as late, however slow the connection is
# Seconds for which a connection may be lost by default: twice the longest interruption that hospitals have reported.
DOWN = 1200.0
LONGEST = 86_400.0  # maximum seconds that a site may take for one answer, if the site still sends messages


@dataclass(frozen=True)
class Timeouts:
    """The time limits and transfer sizes that a study allows a site."""

    silence: float  # maximum seconds for which a site may be silent
    rate: float | None = None  # bytes per second of the slowest connection, or None if the speed is measured
    again: float = ASK_AGAIN  # seconds after which a reply that has not begun to arrive counts as late
    away: float = 0.0  # seconds that a round waits for a site without a connection

    @property
    def piece(self) -> int:
        """The maximum bytes of a piece of a tensor. After the connection breaks, only pieces that have not arrived
        completely are sent again.
        """
        if self.rate is None:
            return PIECE
        return min(LARGEST_PIECE, max(SMALLEST_PIECE, int(PIECE_SECONDS * self.rate)))


def limits(timeouts: Timeouts, side: Literal["server", "site"]) -> dict[str, float]:
    """Return the time limits and sizes that NVFlare's configuration of a job must contain.

    Args:
        side: The party whose configuration is computed.
    """
    held = {"tensor_download_chunk_size": timeouts.piece, "streaming_idle_timeout": max(600.0, 2.0 * timeouts.silence)}
    if side == "site":
        return held | {"max_runner_sync_timeout": max(60.0, timeouts.silence)}
    return held | {"dead_client_grace_period": max(60.0, timeouts.silence, timeouts.away)}
