"""A few batches of a site's own data, forward and backward as the method does it, before a study begins."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import Subset

from medsilo.check.forecast import Rehearsal
from medsilo.core.lifeline import forget_most, most_held
from medsilo.course.phase import Phase, views
from medsilo.federation.participant import Participant
from medsilo.federation.seams import Place
from medsilo.federation.trainer import SHUFFLE
from medsilo.learning.loop import Compute, steps_in
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from medsilo.tasks.task import SiteData

BATCHES = 4


class _Rehearsing(Participant):
    """A site that trains on a few batches as in the study; nothing of it is kept or sent."""

    def passes(self, phase: Phase, number: int, cases: int) -> float:
        """Seconds that training on so many cases takes."""
        self.trainer.train = Subset(self.data.train, range(cases))
        started = time.monotonic()
        phase.work(self.trainer.bench(SHUFFLE, number, lambda: None))
        self._wait()
        return time.monotonic() - started

    def looks(self, cases: int) -> float:
        """Seconds that validating so many cases takes."""
        started = time.monotonic()
        self.evaluation.evaluate(Subset(self.data.validation, range(cases)), lambda: None, self.state.model)
        self._wait()
        return time.monotonic() - started

    def enters(self, phase: Phase) -> None:
        """Receive what the server sends at first, so that everything has the form it will have."""
        self._take_over(views(phase.given, self.place.plan.build_networks()), phase)

    def holds(self) -> tuple[int, int, int]:
        """Bytes of networks, gradients and optimizer state."""
        weights = sum(
            tensor.nbytes for module in self.state.modules.values() for tensor in module.state_dict().values()
        )
        parameters = [parameter for module in self.state.modules.values() for parameter in module.parameters()]
        gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
        memories = (memory for optimizer in self.state.optimizers.values() for memory in optimizer.state.values())
        slots = (slot for memory in memories for slot in memory.values() if isinstance(slot, torch.Tensor))
        return weights, gradients, sum(slot.nbytes for slot in slots)

    def _wait(self) -> None:
        if self.state.compute.device.type == "cuda":
            torch.cuda.synchronize(self.state.compute.device)


def rehearse(
    plan: Plan, site: str, sites: Sequence[str], settings: SiteSettings, data: SiteData, folder: Path
) -> list[Rehearsal]:
    """Every phase in which sites train, tried with a few batches; raises what training would raise.

    The networks begin as they do in the study; what a site would be sent later is not known and left as it begins.
    """
    settings = settings.model_copy(update={"records": folder, "approval": "none"})  # nothing of it counts, or leaves
    place = Place(plan, site, sites, settings, folder)
    Participant(place, data)  # all that is asked before the first round
    short = plan.with_changes(["training.local_epochs=1", "training.local_steps=null", "training.truncate=false"])
    tried, seen = [], set[str]()
    for stretch, short_stretch in zip(plan.course.stretches(), short.course.stretches(), strict=True):
        phase = short_stretch.phase
        if phase.trains and phase.name not in seen:
            rounds = sum(own.rounds for own in plan.course.phases if own.name == phase.name)
            site_alone = _Rehearsing(replace(place, plan=short), data)
            tried.append(_try(site_alone, phase, rounds, stretch.first))
            seen.add(phase.name)
    return tried


def _try(site: _Rehearsing, phase: Phase, rounds: int, number: int) -> Rehearsal:
    size, cases = site.place.plan.training.batch_size, len(site.data.train)  # type: ignore[arg-type]
    one, several = min(size, cases), min(BATCHES * size, cases)
    with site.state.compute.reproducible(site.place.plan.seed), _peak(site.state.compute) as peak:
        site.enters(phase)
        first = site.passes(phase, number, one)
        batch = site.passes(phase, number, several) / steps_in(several, size)
        weights, gradients, optimizer = site.holds()
        checked = min(len(site.data.validation), 4 * site.place.plan.task.evaluation_batch)  # type: ignore[arg-type]
        evaluation = site.looks(checked) / checked
    taken = weights + max(peak[0], gradients + optimizer)  # the networks were there before
    return Rehearsal(phase.name, rounds, first, batch, evaluation, weights, gradients, optimizer, taken)


@contextmanager
def _peak(compute: Compute) -> Iterator[list[int]]:
    """The bytes taken at most inside, beyond those taken before, in a list of one."""
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
