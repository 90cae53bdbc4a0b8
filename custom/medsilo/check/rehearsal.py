"""Train on a few batches of a site's data before a study begins, to predict the time and memory of the study's
rounds.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch.utils.data import Subset

from medsilo.check.machine import weights_of
from medsilo.check.result import LESS_MEMORY, Finding
from medsilo.core.parent_watch import forget_most, most_held
from medsilo.core.text import duration, size_text
from medsilo.federation.participant import Participant, parts_of
from medsilo.federation.site_context import SiteContext
from medsilo.federation.trainer import SHUFFLE
from medsilo.learning.compute import Compute
from medsilo.learning.loop import steps_in
from medsilo.plan import Plan
from medsilo.schedule.phase import Phase, views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData

TIGHT = 0.8  # if training needs more than this fraction of the free memory, the check warns
CHECKS = {
    "memory": "the memory that a few batches of training need, compared with the free memory",
    "time": "the predicted duration of a round at this site, compared with the plan's `participation.timeout`",
}


@dataclass(frozen=True)
class Rehearsal:
    phase: str
    rounds: int
    batch: float  # seconds of training per batch, measured over all rehearsed batches except the first batch
    evaluation: float  # seconds per validation case
    peak: int  # peak memory of the training in bytes


def round_seconds(tried: Rehearsal, plan: Plan, cases: dict[str, int]) -> float:
    batches = plan.training.steps_of_round(steps_in(cases["train"], plan.training.batch_size))
    validated = cases["validation"] * plan.validations / (plan.rounds + 1)  # validation cases per round, on average
    return tried.batch * batches + tried.evaluation * validated


def free_memory(compute: Compute) -> int:
    if compute.device.type == "cuda":
        return torch.cuda.mem_get_info(compute.device)[0]
    return psutil.virtual_memory().available


def rehearsal_findings(tried: Sequence[Rehearsal], plan: Plan, cases: dict[str, int], there: int) -> Iterator[Finding]:
    """Compare the measured memory with the free memory, and the predicted time with the plan's timeout."""
    most = max(tried, key=lambda one: one.peak)
    told = f"a few batches took {size_text(most.peak)} at most; {size_text(there)} were free"
    if most.peak > TIGHT * there:
        yield Finding("memory", "stops" if most.peak > there else "note", told, LESS_MEMORY)
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


BATCHES = 4


class _Rehearsing(Participant):
    """A site that trains on a few batches, without saving or sending results."""

    def passes(self, phase: Phase, number: int, cases: int) -> float:
        """Return the seconds that training on the first `cases` cases takes."""
        self.trainer.train = Subset(self.data.train, range(cases))
        started = time.monotonic()
        phase.train_round(self.trainer.train_context(SHUFFLE, number, lambda: None))
        self._wait()
        return time.monotonic() - started

    def looks(self, cases: int) -> float:
        """Return the seconds that validation on the first `cases` cases takes."""
        started = time.monotonic()
        self.evaluation.evaluate(Subset(self.data.validation, range(cases)), lambda: None, self.state.model)
        self._wait()
        return time.monotonic() - started

    def enters(self, phase: Phase) -> None:
        """Load the tensors that the server would send first in this phase."""
        self.state.take_over(views(phase.given, self.context.plan.build_networks()), phase, self.codec.keeps_at_home)

    def _wait(self) -> None:
        if self.state.compute.device.type == "cuda":
            torch.cuda.synchronize(self.state.compute.device)


def rehearse(
    plan: Plan, site: str, sites: Sequence[str], settings: SiteSettings, data: SiteData, folder: Path
) -> list[Rehearsal]:
    """Train on a few batches in each training phase of a plan, and raise any error of the training.

    The networks keep the study's initial weights, because a rehearsal receives no tensors from a server.
    """
    # a rehearsal sends no answers, so it needs no approval, and its query budget is temporary
    settings = settings.model_copy(update={"state_dir": folder, "approval": "none"})
    place = SiteContext(plan, site, sites, settings, folder)
    parts_of(place, data)  # raises the errors that a study would raise before its first round
    short = plan.with_changes(["training.local_epochs=1", "training.local_steps=null", "training.truncate=false"])
    tried: dict[str, Rehearsal] = {}
    for stretch, short_stretch in zip(plan.course.stretches(), short.course.stretches(), strict=True):
        phase = short_stretch.phase
        if phase.trains and phase.name not in tried:
            rounds = sum(own.rounds for own in plan.course.phases if own.name == phase.name)
            alone = replace(place, plan=short)
            site_alone = _Rehearsing(alone, parts_of(alone, data))
            tried[phase.name] = _try(site_alone, phase, rounds, stretch.first)
    return [*tried.values()]


def _try(site: _Rehearsing, phase: Phase, rounds: int, number: int) -> Rehearsal:
    size, cases = site.context.plan.training.batch_size, len(site.data.train)  # type: ignore[arg-type]
    one, several = min(size, cases), min(BATCHES * size, cases)
    with site.state.compute.reproducible(site.context.plan.seed), _peak(site.state.compute) as peak:
        site.enters(phase)
        # the first batch is slow, so it is not measured
        site.passes(phase, number, one)
        batch = site.passes(phase, number, several) / steps_in(several, size)
        checked = min(len(site.data.validation), 4 * site.context.plan.task.evaluation_batch)  # type: ignore[arg-type]
        evaluation = site.looks(checked) / checked
    parameters = [own for module in site.state.modules.values() for own in module.parameters()]
    gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    weights, _ = weights_of(site.context.plan)
    taken = weights + max(peak[0], gradients)  # the networks existed before the measurement, so add their weights
    return Rehearsal(phase.name, rounds, batch, evaluation, taken)


@contextmanager
def _peak(compute: Compute) -> Iterator[list[int]]:
    """Measure the peak of the memory that a `with` block adds; when the block ends, the yielded list contains the
    bytes.
    """
    found = [0]
    if compute.device.type == "cuda":
        before = torch.cuda.memory_allocated(compute.device)
        torch.cuda.reset_peak_memory_stats(compute.device)
        yield found
        found[0] = torch.cuda.max_memory_allocated(compute.device) - before
        return
    forget_most()
    before = most_held()
    yield found
    found[0] = most_held() - before
