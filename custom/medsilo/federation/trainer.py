"""A site's training: its cases and networks, and passes of the one over the other."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from medsilo.core import optional
from medsilo.core.errors import Unfit
from medsilo.federation.protection import Protection
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_state import SiteState, StatusFile
from medsilo.learning.compute import LossFunction, Stop
from medsilo.learning.drawn import drawn_cases
from medsilo.learning.loop import TrainStep, batches, passed_through, steps_in, train_epoch
from medsilo.learning.optimizers import begin_round
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.schedule.phase import Phase
from medsilo.schedule.train_context import TrainContext
from medsilo.site.party import FILE_NAME
from medsilo.tasks.site_data import SiteData, label_counts, names_of, patients_of

if TYPE_CHECKING:  # only under a promise of privacy
    from medsilo.federation.private_site import PrivateSite

SHUFFLE = "shuffle"  # for what data are drawn in training
Tells = Callable[[nn.Module, Stop], float | None]  # a network's number, as it may leave


class Trainer:
    """A site of a study, as far as it trains."""

    def __init__(
        self,
        place: SiteContext,
        data: SiteData,
        state: SiteState,
        protection: Protection,
        private: "PrivateSite | None",
        tells: tuple[Tells, Tells],
    ) -> None:
        """tells: a network's loss over the training cases and its score over the validation cases."""
        self.place, self.data, self.state, self.protection = place, data, state, protection
        self.private, self.tells = private, tells
        self.train: Dataset = data.train  # the training cases of this study
        self.doing = StatusFile(place.folder, device=str(self.state.compute.device))

    @cached_property
    def drawn_from(self) -> int:
        """Return the number from which chance in training follows: the plan's seed, or, where real patients were
        promised privacy, one that only this hospital knows."""
        plan = self.place.plan
        return self.protection.book.number("draws") if self.private and not plan.task.synthetic else plan.seed

    @property
    def samples(self) -> int:
        """Return the cases that this site trains on."""
        return len(self.train)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ whose cases
    def truncate(self, cases: int | None) -> None:
        """Train on so many cases, always the same ones, when the plan asks for sites of one size."""
        self.train = self.data.train
        all_of_them: int = len(self.train)  # type: ignore[arg-type]
        if not self.place.plan.training.truncate or cases is None or cases >= all_of_them:
            return
        seed = self.place.plan.seed
        if self.protection.on:  # always the same cases, in steps that are no single patient's
            unit = self.place.settings.count_unit(False)
            seed, cases = self.protection.book.number("truncate"), max(cases // unit, 1) * unit
        drawn = torch.randperm(all_of_them, generator=generator_for(seed, self.place.site, "truncate"))
        self.train = Subset(self.data.train, sorted(drawn[: max(cases, 1)].tolist()))
        if self.protection.on and len(set(patients_of(self.train))) < self.place.settings.least(False):
            raise Unfit(
                f"training.truncate leaves {cases} cases, of fewer patients than this hospital trains with "
                f"(min_patients_per_metric in its {FILE_NAME}); set it to false"
            )
        self.check_averages()

    def check_averages(self) -> None:
        """Raise Unfit unless an average that leaves the site covers as many images, and patients, as demanded."""
        plan = self.place.plan
        least = self.place.settings.least_averaged(plan.task.synthetic)
        if not self.place.trains:
            return
        for average in (group.average for phase in plan.course.phases for group in phase.sent):
            images = average.covers(self.samples, plan.training) if average else least
            patients = len(set(patients_of(self.train))) if average and self.protection.on else images
            if min(images, patients) < least:
                raise Unfit(
                    f"the plan averages too few images or patients, this hospital demands {least}. Add patients, or "
                    "change the plan: a larger training.batch_size for HarmoFL, algorithm.selector_sync=server-adam "
                    "for FedSM"
                )

    # ------------------------------------------------------------------ a round
    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        """Do what a phase does in a round; returns the mean training loss."""
        plan = self.place.plan
        if plan.training.optimizer_state == "reset":
            self.state.make_optimizers()
        for optimizer in self.state.optimizers.values():
            begin_round(plan.training, optimizer, number, plan.rounds)
        bench = self.bench(SHUFFLE, number, stop)
        if phase.trains:
            self.doing.begin("training", plan.training.steps_of_round(bench.steps))
        else:
            self.doing.begin("measuring")
        return phase.work(bench)

    def bench(self, purpose: str, number: int, stop: Stop) -> TrainContext:
        """Return what the method works with; the order of the data is drawn for this purpose and round."""
        plan, site = self.place.plan, self.place.site
        layer = plan.algorithm.input_layer(self.state.modules)
        size, task = plan.training.batch_size, plan.task
        steps = self.private.steps_in_epoch if self.private else steps_in(self.samples, size)
        if task.draws:  # there are no passes to start again
            steps = plan.training.local_steps or steps
        private = self.private.training(number) if self.private and purpose == SHUFFLE else None
        compute = self.state.compute
        rounded = self.place.settings.resolution

        def epoch(lessons: Sequence[TrainStep], local_epoch: int, most: int | None = None) -> float:
            order = generator_for(plan.seed, site, purpose, number, local_epoch)
            drawn = seed_for(self.drawn_from, site, "augment", purpose, number, local_epoch)
            number_of = steps if most is None else min(most, steps)
            cases = drawn_cases(self.train, task.variation, drawn, self._names(self.train))
            if private:
                drawn_batches = private.sample.batches(cases, number_of, compute)
                if layer:  # its amplitude was released before, so that a case is changed by nothing of another
                    drawn_batches = passed_through(layer, drawn_batches, learns=False)
                return train_epoch(drawn_batches, lessons, compute, stop)
            data: Iterator[tuple[Tensor, Tensor]]
            if task.draws:
                data = batches(task.draw_batches(cases, size, number_of, drawn), size, compute)
            else:
                data = islice(batches(cases, size, compute, order), most)
            if layer:
                data = passed_through(layer, data, learns=purpose == SHUFFLE)
            return train_epoch(data, lessons, compute, stop)

        return TrainContext(
            site,
            self.place.trainers,
            self.state.modules,
            self.state.optimizers,
            plan.training,
            self.loss,
            compute,
            epoch,
            lambda: self.in_order(self.data.train, stop),
            lambda: self.private.size if self.private else rounded(patients_of(self.data.train), task.synthetic).cases,
            steps,
            generator_for(self.drawn_from, site, "method", number),
            partial(optional.perturbed_step, perturbed.alpha) if (perturbed := plan.algorithm.perturbation) else None,
            private,
            self._labels,
            lambda model: self.tells[0](model, stop),
            lambda model: self.tells[1](model, stop),
        )

    @cached_property
    def loss(self) -> LossFunction:
        """Return what training minimises: the task's loss, with the weights that the plan gives classes."""
        task, weights = self.place.plan.task, self.place.plan.training.class_weights
        if weights == "none":
            return task.goal.loss
        counted = optional.balanced(self._labels()) if weights == "balanced" else weights
        return optional.weighted(task.goal.loss, torch.as_tensor(counted), task.goal.cross_entropy)

    def in_order(self, part: Dataset, stop: Stop) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a part's cases once, behind the input layer."""
        plan = self.place.plan
        layer = plan.algorithm.input_layer(self.state.modules)
        seed = seed_for(self.drawn_from, self.place.site, "in order")
        cases = drawn_cases(part, plan.task.piece, seed, self._names(part))
        for inputs, targets in batches(cases, plan.task.evaluation_batch, self.state.compute):
            stop()
            yield layer.eval()(inputs) if layer else inputs, targets

    def _names(self, cases: Dataset) -> Sequence[str] | None:
        """Return what a case's chance follows from where privacy is promised; None: from its place."""
        return names_of(cases) if self.private else None

    def _labels(self) -> list[int]:
        """Return how often each label occurs among the training cases."""
        return label_counts(self.data.train, self.place.plan.task.goal.classes)
