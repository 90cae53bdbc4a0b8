"""From answers to the next round's tensors: the server's inner seam, where secure aggregation is.

It is inside of a round: a sum is opened when enough sites have answered, before the mixers end the round.
"""

from collections.abc import Mapping
from typing import Any

from medsilo.core.errors import ParticipationError
from medsilo.core.tensors import Groups
from medsilo.course.phase import Phase
from medsilo.federation.seams import Missing
from medsilo.federation.server_state import ServerState
from medsilo.runs.messages import Joined


class RoundAggregation:
    """In clear: the mixers take each answer as it comes."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    def agree(self, joined: Mapping[str, Joined]) -> None:
        """Let those that have joined agree on what they need beside the plan, and somebody have all that it names."""
        held = [{*answer.absent} for site, answer in joined.items() if site not in self.state.plan.participation.unseen]
        if lacking := sorted(set.intersection(*held)) if held else []:
            raise ParticipationError(f"no hospital that trains has {', '.join(lacking)}; take it out of the plan")

    def begin(self, number: int, phase: Phase) -> Mapping[str, Missing]:
        """Begin a round whose mixers are open; returns the sites that are not in it, and why."""
        return {}

    def expected(self, phase: Phase) -> Groups:
        """Return the layout of what sites send in a phase, as it travels."""
        return self.state.expected(phase)

    def letters(self, site: str, groups: Groups) -> dict[str, Any]:
        """Return what a site is told beside the tensors that it is sent after it has joined."""
        return {}

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        """Take what a site sends, whose form was checked; raises Refused where its numbers can't be."""
        self.state.take(site, groups, samples, phase)

    def finish(self, number: int) -> None:
        """Give the mixers what they lack; raises ParticipationError where too few sites help."""
