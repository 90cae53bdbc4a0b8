"""The timeouts of a study, from what its plan says.

`participation.heartbeat_timeout`: how long a site may be silent. `participation.timeout`: for one answer.
`transport.slowest`: how slow a line may be.
"""

from medsilo.plan import Plan
from nvflare_reliability.timeouts import ASK_AGAIN, DOWN, LONGEST, Timeouts


def timeouts_of(plan: Plan) -> Timeouts:
    """Return what a plan grants; nobody is waited for longer than for an answer."""
    own = plan.participation
    silence = float(min(own.longest_silence or DOWN, own.limit or LONGEST))
    away = own.retry_timeout if own.when_missing == "wait" else 0
    return Timeouts(silence, plan.transport.rate, min(ASK_AGAIN, silence / 4), float(away))
