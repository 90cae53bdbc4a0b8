"""NVFlare's time limits that a site's line can hit. They follow from what is measured, and from a few numbers."""

from dataclasses import dataclass
from typing import Literal

PIECE_SECONDS = 10.0  # that a piece of a tensor takes on the slowest line
LARGEST_PIECE = 16 << 20  # bytes
SMALLEST_PIECE = 1 << 14
PIECE = 1 << 20  # bytes, where lines are measured
ASK_AGAIN = 30.0  # seconds after which a reply is late on any line
DOWN = 1200.0  # seconds that a line may be down where nobody says less: twice the longest cuts that hospitals told of
LONGEST = 86_400.0  # seconds for one answer of a site that shows signs of life


@dataclass(frozen=True)
class Timeouts:
    """The time and the bytes that a study grants to a site."""

    silence: float  # of a site
    rate: float | None = None  # bytes a second of the slowest line; None: lines are measured
    again: float = ASK_AGAIN  # until a reply is late that does not begin to come, however slow its line
    away: float = 0.0  # that a round waits for a site that is lost

    @property
    def piece(self) -> int:
        """Return the bytes of a piece of a tensor: what arrived stays when the line is cut within the next."""
        if self.rate is None:
            return PIECE
        return min(LARGEST_PIECE, max(SMALLEST_PIECE, int(PIECE_SECONDS * self.rate)))


def limits(timeouts: Timeouts, side: Literal["server", "site"]) -> dict[str, float]:
    """Return NVFlare's limits that a job's configuration sets for one side."""
    held = {"tensor_download_chunk_size": timeouts.piece, "streaming_idle_timeout": max(600.0, 2.0 * timeouts.silence)}
    if side == "site":
        return held | {"max_runner_sync_timeout": max(60.0, timeouts.silence)}
    return held | {"dead_client_grace_period": max(60.0, timeouts.silence, timeouts.away)}
