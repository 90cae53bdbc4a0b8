"""The time that a site has.

NVFlare's time limits that a hospital's line can hit stand here only. They follow from what is measured, or from three
keys of the plan where these are set.

`participation.silence`: how long a site may be silent. `participation.timeout`: how long a site has for one answer.
`transport.slowest`: how slow a line may be.
"""

from dataclasses import dataclass
from typing import Literal

from medsilo.plan import Plan

PIECE_SECONDS = 10.0  # that a piece of a tensor takes on the slowest line
LARGEST_PIECE = 16 << 20  # bytes
SMALLEST_PIECE = 1 << 14
PIECE = 1 << 20  # bytes, where lines are measured
ASK_AGAIN = 30.0  # seconds after which a reply is late on any line
DOWN = 1200.0  # seconds that a line may be down where nobody says less: twice the longest cuts that hospitals told of
LONGEST = 86_400.0  # seconds for one answer of a site that shows signs of life


@dataclass(frozen=True)
class Patience:
    """The time and the bytes that a plan allows."""

    silence: float  # of a site
    rate: float | None = None  # bytes a second of the slowest line; None: lines are measured
    again: float = ASK_AGAIN  # until a reply is late that does not begin to come, however slow its line
    away: float = 0.0  # that a round waits for a site that is lost

    @classmethod
    def of(cls, plan: Plan) -> "Patience":
        """Return what a plan grants; nobody is waited for longer than for an answer."""
        own = plan.participation
        silence = float(min(own.longest_silence or DOWN, own.limit or LONGEST))
        away = own.patience if own.when_missing == "wait" else 0
        return cls(silence, plan.transport.rate, min(ASK_AGAIN, silence / 4), float(away))

    @property
    def piece(self) -> int:
        """Return the bytes of a piece of a tensor: what arrived stays when the line is cut within the next."""
        if self.rate is None:
            return PIECE
        return min(LARGEST_PIECE, max(SMALLEST_PIECE, int(PIECE_SECONDS * self.rate)))


def limits(patience: Patience, side: Literal["server", "site"]) -> dict[str, float]:
    """Return NVFlare's limits that a job's configuration sets for one side; docs/reference/keys.md explains them."""
    held = {
        "tensor_download_chunk_size": patience.piece,
        "streaming_idle_timeout": max(600.0, 2.0 * patience.silence),
    }
    if side == "site":
        return held | {"max_runner_sync_timeout": max(60.0, patience.silence)}
    return held | {"dead_client_grace_period": max(60.0, patience.silence, patience.away)}
