"""Derive the timeouts of a study from the study's plan.

`participation.heartbeat_timeout` is the longest time without a sign of life from a site. `participation.timeout` is the
longest time that a site may take to answer. `transport.slowest` is the speed of the slowest expected connection.
"""

from medsilo.plan import Plan
from nvflare_reliability.timeouts import ASK_AGAIN, DOWN, LONGEST, Timeouts


def timeouts_of(plan: Plan) -> Timeouts:
    """Return the timeouts of a plan. The limit on a site's silence is at most the limit on the time for an answer."""
    own = plan.participation
    silence = float(min(own.longest_silence or DOWN, own.limit or LONGEST))
    away = own.retry_timeout if own.when_missing == "wait" else 0
    return Timeouts(silence, plan.transport.rate, min(ASK_AGAIN, silence / 4), float(away))
