"""The time that a site has.

NVFlare's time limits that a hospital's line can hit stand here only. They follow from what is measured, or from three
keys of the plan where these are set.

`participation.silence`: how long a site may be silent. `participation.timeout`: how long a site has for one answer.
`transport.slowest`: how slow a line may be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Limit:
    """One of NVFlare's limits."""

    key: str
    where: Literal["server", "site", "both", "request"]  # whose configuration in the job sets it, or each request
    default: float  # NVFlare's own
    ours: Callable[[Patience], float]
    meaning: str


LIMITS = (
    Limit(
        "tensor_download_chunk_size",
        "both",
        2 << 20,
        lambda patience: patience.piece,
        "bytes of tensors that travel in one piece: 1 MiB, or ten seconds of `transport.slowest`",
    ),
    Limit(
        "tensor_streaming_per_request_timeout",
        "request",
        600.0,
        lambda patience: patience.again,
        "seconds until it is asked whether a piece was lost that does not begin to come: at most; the line's own pace "
        "says how soon. NVFlare itself asks four times, and never again once the line is down",
    ),
    Limit(
        "get_task_timeout",
        "request",
        300.0,
        lambda patience: 2 * patience.again,
        "seconds until a site asks for work again when the reply does not begin to come",
    ),
    Limit(
        "submit_task_result_timeout",
        "request",
        300.0,
        lambda patience: patience.silence,
        "seconds that a site's answer may wait for the server to fetch its next piece; once all are fetched, as many "
        "as for work",
    ),
    Limit(
        "streaming_idle_timeout",
        "both",
        600.0,
        lambda patience: max(600.0, 2.0 * patience.silence),
        "seconds that tensors are held ready for who does not ask for their next piece",
    ),
    Limit(
        "max_runner_sync_timeout",
        "site",
        60.0,
        lambda patience: max(60.0, patience.silence),
        "seconds in which a job's process at a site has to reach the server's",
    ),
    Limit(
        "dead_client_grace_period",
        "server",
        60.0,
        lambda patience: max(60.0, patience.silence, patience.away),
        "seconds from NVFlare's belief that a site is dead (600 seconds without a sign) until it ends a job that needs "
        "the site",
    ),
)


def limits(patience: Patience, side: str) -> dict[str, Any]:
    """Return the limits that a job's configuration sets for one side."""
    return {limit.key: limit.ours(patience) for limit in LIMITS if limit.where in (side, "both")}
