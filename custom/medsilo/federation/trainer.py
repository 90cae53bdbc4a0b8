"""A site's cases and networks, and passes of the one over the other: what each process that trains for a site has."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from medsilo.course.workbench import Workbench
from medsilo.federation.private_site import PrivateSite
from medsilo.federation.site_state import SiteState
from medsilo.learning.class_weights import balanced, weighted
from medsilo.learning.loop import (
    Compute,
    DrawnCases,
    Lesson,
    LossFunction,
    Stop,
    batches,
    passed_through,
    steps_in,
    train_epoch,
)
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.learning.team import ALONE, Team
from medsilo.plan import Plan
from medsilo.tasks.task import SiteData, label_counts, names_of, patients_of

SHUFFLE = "shuffle"  # for what data are drawn in training


class Trainer:
    """A site of a study, as far as it trains."""

    plan: Plan
    site: str
    sites: Sequence[str]  # of the study, in sorted order
    compute: Compute
    data: SiteData
    train: Dataset  # the training cases of this study
    state: SiteState
    private: PrivateSite | None = None
    secret: int | None = None  # where real patients were promised privacy, a number that only this hospital knows
    team: Team = ALONE  # in training

    def mark_of_cases(self) -> str:
        """Return a hash of whose the training cases are, in their order."""
        return hashlib.sha256("\x1f".join(patients_of(self.data.train)).encode()).hexdigest()

    def bench(self, purpose: str, number: int, stop: Stop) -> Workbench:
        """Return what the method works with; the order of the data is drawn for this purpose and round."""
        layer = self.plan.algorithm.input_layer(self.state.modules)
        size = self.plan.training.batch_size
        task = self.plan.task
        steps = self.private.steps_in_epoch if self.private else steps_in(self._samples(), size)
        if task.draws:  # there are no passes to begin anew
            steps = self.plan.training.local_steps or steps
        private = self.private.training(number, self.state.modules) if self.private and purpose == SHUFFLE else None
        compute = replace(self.compute, team=self.team) if purpose == SHUFFLE else self.compute

        def epoch(lessons: Sequence[Lesson], local_epoch: int, most: int | None = None) -> float:
            order = generator_for(self.plan.seed, self.site, purpose, number, local_epoch)
            drawn = seed_for(self.drawn_from, self.site, "augment", purpose, number, local_epoch)
            number_of = steps if most is None else min(most, steps)
            cases = self.train
            if task.augments:
                cases = DrawnCases(cases, task.augmented, drawn, self._names(cases))
            if private:
                drawn_batches = private.sample.batches(cases, number_of, compute)
                if layer:  # its amplitude was released before, so that a case is changed by nothing of another
                    drawn_batches = passed_through(layer, drawn_batches, learns=False)
                return train_epoch(drawn_batches, lessons, compute, stop)
            data: Iterator[tuple[Tensor, Tensor]]
            if task.draws:
                data = batches(task.drawn(cases, size, number_of, drawn), size, compute)
            else:
                data = islice(batches(cases, size, compute, order), most)
            if layer:
                data = passed_through(layer, data, learns=purpose == SHUFFLE)
            return train_epoch(data, lessons, compute, stop)

        return Workbench(
            self.site,
            self._trainers,
            self.state.modules,
            self.state.optimizers,
            self.plan.training,
            self._loss,
            compute,
            epoch,
            lambda: self._in_order(self.data.train, stop),
            self.private.size if self.private else len(self.data.train),  # type: ignore[arg-type]
            steps,
            generator_for(self.drawn_from, self.site, "method", number),
            self.plan.algorithm.perturbation,
            private,
            self._labels,
            lambda model: compute.team.told(self._told_loss(model, stop)),
            lambda model: compute.team.told(self._told_score(model, stop)),
        )

    def _told_loss(self, model: nn.Module, stop: Stop) -> float | None:
        """Return a network's mean loss over the training cases as it may leave; the site's first process knows it."""
        return None

    def _told_score(self, model: nn.Module, stop: Stop) -> float | None:
        """Return a network's score over the validation cases, likewise."""
        return None

    @property
    def _trainers(self) -> list[str]:
        """The hospitals that train in this study, in sorted order."""
        return [site for site in self.sites if site not in self.plan.participation.unseen]

    @property
    def drawn_from(self) -> int:
        """Return the number from which chance in training follows: the plan's seed, or a secret of this hospital."""
        return self.plan.seed if self.secret is None else self.secret

    def _names(self, cases: Dataset) -> Sequence[str] | None:
        """Return what a case's chance follows from where privacy is promised; None: from its place."""
        return names_of(cases) if self.private else None

    def _samples(self) -> int:
        """Return the cases that this site trains on."""
        return len(self.train)  # type: ignore[arg-type]

    @cached_property
    def _loss(self) -> LossFunction:
        """Return what training minimises: the task's loss, with the weights that the plan gives classes."""
        task, weights = self.plan.task, self.plan.training.class_weights
        if weights == "none":
            return task.loss
        counted = balanced(self._labels()) if weights == "balanced" else weights
        return weighted(task.loss, torch.as_tensor(counted), task.cross_entropy)

    def _labels(self) -> list[int]:
        """Return how often each label occurs among the training cases."""
        return label_counts(self.data.train, self.plan.task.classes)

    def _in_order(self, part: Dataset, stop: Stop) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a part's cases once, behind the input layer."""
        layer = self.plan.algorithm.input_layer(self.state.modules)
        cases = self.plan.task.pieces(part, seed_for(self.drawn_from, self.site, "in order"), self._names(part))
        for inputs, targets in batches(cases, self.plan.task.evaluation_batch, self.compute):
            stop()
            yield layer.eval()(inputs) if layer else inputs, targets
