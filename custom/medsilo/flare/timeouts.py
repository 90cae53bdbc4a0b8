"""Derive a study's timeouts from its plan.

`participation.heartbeat_timeout` limits a site's silence. `participation.timeout` limits the time of one answer.
`transport.slowest` is the slowest expected connection.
"""

from medsilo.plan import Plan
from nvflare_reliability.timeouts import ASK_AGAIN, DOWN, LONGEST, Timeouts


def timeouts_of(plan: Plan) -> Timeouts:
    """Return the timeouts of a plan; the limit of silence is at most the limit of an answer."""
    own = plan.participation
    silence = float(min(own.longest_silence or DOWN, own.limit or LONGEST))
    away = own.retry_timeout if own.when_missing == "wait" else 0
    return Timeouts(silence, plan.transport.rate, min(ASK_AGAIN, silence / 4), float(away))
