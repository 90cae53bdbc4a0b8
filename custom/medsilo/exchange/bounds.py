"""Limit the size of a study's messages; the limit follows from the plan alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from medsilo.core.tensors import packed
from medsilo.plan import Plan
from medsilo.runs.messages import MOST_VALUES, PIECE
from medsilo.schedule.phase import Group, Phase, views

SLACK = 8 << 20  # limit on the bytes of a message, not counting the bytes of the message's tensors
WIDER = 2  # largest factor by which a tensor's bytes grow when a hospital's filters convert the tensor to another type
# limit on the values in a message that belong neither to a tensor, nor to a site, nor to counts
BESIDE = 2 * MOST_VALUES
MOST_UNNAMED = 32  # assumed number of sites, until the server's first request reports the number of sites
PER_TENSOR = 32  # limit on the number of values with which a message describes one tensor


@dataclass(frozen=True)
class Bounds:
    size: int = SLACK  # bytes
    values: int = BESIDE


def answer_bounds(plan: Plan) -> Bounds:
    return _bounds(plan, lambda phase: phase.sent)


def request_bounds(plan: Plan) -> Bounds:
    if not plan.participation.sites:
        plan = plan.among(f"site-{number}" for number in range(max(MOST_UNNAMED, plan.participation.required)))
    own = _bounds(plan, lambda phase: phase.given)
    files = plan.network.files.values()
    pieces = sum(-(-size // PIECE) for size in files)
    return replace(own, size=own.size + sum(files), values=own.values + PER_TENSOR * pieces)


def _bounds(plan: Plan, travels: Callable[[Phase], Sequence[Group]]) -> Bounds:
    networks = plan.layout()
    phases: Iterable[Phase] = (*plan.course.phases, plan.course.delivery)
    size = tensors = 0
    wider = WIDER * plan.secure_aggregation.times_as_large
    for phase in phases:
        sent = [tensor for group in views(travels(phase), networks).values() for tensor in group.values()]
        size = max(size, sum(packed(tensor, plan.transport.precision).nbytes for tensor in sent))
        # A training script sends a tensor in pieces, and each piece counts as a tensor
        tensors = max(tensors, sum(1 + tensor.nbytes // PIECE for tensor in sent))
    sites = len(plan.participation.everyone)
    return Bounds(SLACK + wider * size, BESIDE + PER_TENSOR * (tensors + sites) + sum(plan.task.goal.layout.values()))
