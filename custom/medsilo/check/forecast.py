"""Time and memory of the rounds to come, estimated from a few batches."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from medsilo.check.result import Finding, Table, duration
from medsilo.core.text import size_text
from medsilo.learning.loop import Compute, steps_in
from medsilo.plan import Plan

TIGHT = 0.8  # of the free memory
COLUMNS = ("phase", "s, first batch", "s a batch", "batches a round", "s a validation case", "s a round", "MB")
REMEDY = "end other programs, use a larger device, or ask the lead for a smaller training.batch_size"


@dataclass(frozen=True)
class Rehearsal:
    """One phase of a plan, tried with a few batches of a site's own data."""

    phase: str
    rounds: int
    first: float  # seconds that the first batch took, with all that happens once
    batch: float  # seconds per batch after that
    evaluation: float  # seconds per validation case
    weights: int  # bytes of all the networks
    gradients: int
    optimizer: int  # bytes of the optimizers' state
    peak: int  # bytes taken at most, all of these included

    @property
    def activations(self) -> int:
        """Return what is left of the peak: the batch itself and what the layers keep for going back."""
        return max(0, self.peak - self.weights - self.gradients - self.optimizer)


def round_seconds(tried: Rehearsal, plan: Plan, cases: dict[str, int]) -> float:
    """Return how long a site will work in a round of this phase."""
    batches = plan.training.steps_of_round(steps_in(cases["train"], plan.training.batch_size))
    validated = cases["validation"] * plan.validations / (plan.rounds + 1)  # in a round, on average
    return tried.batch * batches + tried.evaluation * validated


def free_memory(compute: Compute) -> int:
    """Bytes that are free on the device."""
    import torch

    if compute.device.type == "cuda":
        return torch.cuda.mem_get_info(compute.device)[0]
    return psutil.virtual_memory().available


def within(limit: int | None, free: int, compute: Compute) -> int:
    """Return the memory that is free under the site's own limit, for a training process as large as this one."""
    if limit is None or compute.device.type == "cuda":
        return free
    return max(0, min(free, (limit << 20) - psutil.Process().memory_info().rss))


def rehearsal_findings(tried: Sequence[Rehearsal], plan: Plan, cases: dict[str, int], there: int) -> Iterator[Finding]:
    """The memory against what was free, the time against what the plan grants."""
    most = max(tried, key=lambda one: one.peak)
    told = (
        f"{size_text(most.peak)} at most: networks {size_text(most.weights)}, gradients {size_text(most.gradients)}, "
        f"optimizer {size_text(most.optimizer)}, activations and batch {size_text(most.activations)}; "
        f"{size_text(there)} were free"
    )
    if most.peak > TIGHT * there:
        yield Finding("memory", "stops" if most.peak > there else "note", told, REMEDY)
    else:
        yield Finding("memory", "ok", told)
    for one in tried:
        seconds, limit = round_seconds(one, plan, cases), plan.participation.limit or math.inf
        told = (
            f"phase {one.phase}: a round will take about {duration(seconds)} here, all {one.rounds} of them about "
            f"{duration(seconds * one.rounds)}, beside the other sites' and the network's time"
        )
        if seconds > limit:
            remedy = f"the plan grants {limit} s (participation.timeout): ask the lead for more, or use a faster device"
            yield Finding("time", "stops", told, remedy)
        elif seconds > limit / 2:
            yield Finding("time", "note", told, f"the plan grants {limit} s (participation.timeout); ask for more")
        else:
            yield Finding("time", "ok", told)


def rehearsal_table(tried: Sequence[Rehearsal], plan: Plan, cases: dict[str, int]) -> Table:
    """Return what was measured."""
    batches = plan.training.steps_of_round(steps_in(cases["train"], plan.training.batch_size))
    rows = [
        (
            one.phase,
            one.first,
            one.batch,
            batches,
            one.evaluation,
            round_seconds(one, plan, cases),
            round(one.peak / 1e6, 1),
        )
        for one in tried
    ]
    return Table("A few batches, forward and backward", COLUMNS, rows)
