"""Train a site's networks on the site's cases."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from medsilo.core.errors import UnfitData
from medsilo.federation.disclosure import Disclosure
from medsilo.federation.evaluation import Evaluation
from medsilo.federation.protection import Protection
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_state import SiteState, StatusFile
from medsilo.learning.compute import LossFunction, Stop
from medsilo.learning.loop import TrainStep, batches, evaluate, passed_through, steps_in, train_epoch
from medsilo.learning.optimizers import begin_round
from medsilo.learning.sampling import drawn_cases
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.schedule.phase import Phase
from medsilo.schedule.train_context import TrainContext
from medsilo.site.party import FILE_NAME
from medsilo.tasks.site_data import SiteData, label_counts, names_of, patients_of

# imported only for type checking, because only private training needs private_site.py
if TYPE_CHECKING:
    from medsilo.federation.private_site import PrivateSite

# purpose from which the seeds of the training order are derived
SHUFFLE = "shuffle"


class Trainer:
    def __init__(
        self,
        context: SiteContext,
        data: SiteData,
        state: SiteState,
        protection: Protection,
        private: "PrivateSite | None",
        disclosure: Disclosure,
        evaluation: Evaluation,
    ) -> None:
        self.context, self.data, self.state, self.protection = context, data, state, protection
        self.private, self.disclosure, self.evaluation = private, disclosure, evaluation
        self.train: Dataset = data.train  # the training cases of this study
        self.doing = StatusFile(context.folder, device=str(self.state.compute.device))

    @cached_property
    def drawn_from(self) -> int:
        """The seed of random choices in training: for private training on real patients, the hospital's secret seed;
        otherwise, the plan's seed.
        """
        plan = self.context.plan
        return self.protection.budget.number("draws") if self.private and not plan.task.synthetic else plan.seed

    @property
    def samples(self) -> int:
        return len(self.train)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ whose cases
    def truncate(self, cases: int | None) -> None:
        """If the plan requires sites of equal size, keep only a given number of training cases; every call keeps the
        same cases.
        """
        self.train = self.data.train
        all_of_them: int = len(self.train)  # type: ignore[arg-type]
        if not self.context.plan.training.truncate or cases is None or cases >= all_of_them:
            return
        seed = self.context.plan.seed
        # The number of cases is rounded, so that the disclosed number reveals no single patient. A fixed seed makes
        # every call select the same cases.
        if self.protection.on:
            unit = self.context.settings.count_unit(False)
            seed, cases = self.protection.budget.number("truncate"), max(cases // unit, 1) * unit
        drawn = torch.randperm(all_of_them, generator=generator_for(seed, self.context.site, "truncate"))
        self.train = Subset(self.data.train, sorted(drawn[: max(cases, 1)].tolist()))
        if self.protection.on and len(set(patients_of(self.train))) < self.context.settings.least(False):
            raise UnfitData(
                f"training.truncate leaves {cases} cases, of fewer patients than this hospital trains with "
                f"(min_patients_per_metric in its {FILE_NAME}); set it to false"
            )
        self.check_averages()

    def check_averages(self) -> None:
        """Raise UnfitData if an average that the site sends covers fewer patients than the hospital demands."""
        plan = self.context.plan
        least = self.context.settings.least_averaged(plan.task.synthetic)
        if not self.context.trains:
            return
        for average in (group.average for phase in plan.course.phases for group in phase.sent):
            images = average.covers(self.samples, plan.training) if average else least
            patients = len(set(patients_of(self.train))) if average and self.protection.on else images
            if min(images, patients) < least:
                raise UnfitData(
                    f"the plan averages too few images or patients, this hospital demands {least}. Add patients, or "
                    "change the plan: a larger training.batch_size for HarmoFL, algorithm.selector_sync=server-adam "
                    "for FedSM"
                )

    # ------------------------------------------------------------------ a round
    def work(self, number: int, phase: Phase, stop: Stop) -> float:
        """Train one round of a phase, and return the mean training loss."""
        plan = self.context.plan
        if plan.training.optimizer_state == "reset":
            self.state.make_optimizers()
        for optimizer in self.state.optimizers.values():
            begin_round(plan.training, optimizer, number, plan.rounds)
        context = self.train_context(SHUFFLE, number, stop)
        if phase.trains:
            self.doing.begin("training", plan.training.steps_of_round(context.cases.steps))
        else:
            self.doing.begin("measuring")
        return phase.train_round(context)

    def train_context(self, purpose: str, number: int, stop: Stop) -> TrainContext:
        """Return the context in which a method trains; the context's purpose and round determine the order of the
        training data.
        """
        plan, site = self.context.plan, self.context.site
        step = None
        if perturbed := plan.algorithm.perturbation:
            from medsilo.learning.perturbation import perturbed_step

            step = partial(perturbed_step, perturbed.alpha)
        cases = RoundCases(self, purpose, number, stop)
        return TrainContext(
            site=site,
            sites=self.context.trainers,
            modules=self.state.modules,
            optimizers=self.state.optimizers,
            training=plan.training,
            loss=self.loss,
            compute=self.state.compute,
            cases=cases,
            random=generator_for(self.drawn_from, site, "method", number),
            rule=step,
            private=cases.private,
        )

    @cached_property
    def loss(self) -> LossFunction:
        """The task's loss with the plan's class weights."""
        task, weights = self.context.plan.task, self.context.plan.training.class_weights
        if weights == "none":
            return task.goal.loss
        from medsilo.learning.class_weights import balanced, weighted

        counted = balanced(self.labels()) if weights == "balanced" else weights
        return weighted(task.goal.loss, torch.as_tensor(counted), task.goal.cross_entropy)

    def in_order(self, part: Dataset, stop: Stop) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each case once, in batches that the network's input layer has transformed."""
        plan = self.context.plan
        layer = plan.algorithm.input_layer(self.state.modules)
        seed = seed_for(self.drawn_from, self.context.site, "in order")
        cases = drawn_cases(part, plan.task.piece, seed, self.names(part))
        for inputs, targets in batches(cases, plan.task.evaluation_batch, self.state.compute):
            stop()
            yield layer.eval()(inputs) if layer else inputs, targets

    def names(self, cases: Dataset) -> Sequence[str] | None:
        """Return the cases' names under differential privacy, because a case's name then seeds its augmentation."""
        return names_of(cases) if self.private else None

    def labels(self) -> list[int]:
        return label_counts(self.data.train, self.context.plan.task.goal.classes)


class RoundCases:
    """Trains networks on a site's cases in one round."""

    def __init__(self, trainer: Trainer, purpose: str, number: int, stop: Stop) -> None:
        """Prepare one pass over the training cases in a round.

        Args:
            purpose: the purpose from which the seed of the order is derived
        """
        self.trainer, self.purpose, self.number, self.stop = trainer, purpose, number, stop
        self.learns = purpose == SHUFFLE
        self.private = trainer.private.training(number) if trainer.private and self.learns else None

    @property
    def steps(self) -> int:
        own, training = self.trainer, self.trainer.context.plan.training
        steps = own.private.steps_in_epoch if own.private else steps_in(own.samples, training.batch_size)
        # If the task draws batches at random, a round is one pass, which has `local_steps` batches.
        return training.local_steps or steps if own.context.plan.task.draws else steps

    def epoch(self, train_steps: Sequence[TrainStep], number: int, most: int | None = None) -> float:
        own, site, compute = self.trainer, self.trainer.context.site, self.trainer.state.compute
        plan, task, size = own.context.plan, own.context.plan.task, own.context.plan.training.batch_size
        drawn = seed_for(own.drawn_from, site, "augment", self.purpose, self.number, number)
        steps = self.steps if most is None else min(most, self.steps)
        cases = drawn_cases(own.train, task.variation, drawn, own.names(own.train))
        data: Iterator[tuple[Tensor, Tensor]]
        if self.private:
            data = self.private.sample.batches(cases, steps, compute)
        elif task.draws:
            data = batches(task.draw_batches(cases, size, steps, drawn), size, compute)
        else:
            order = generator_for(plan.seed, site, self.purpose, self.number, number)
            data = islice(batches(cases, size, compute, order), most)
        if layer := plan.algorithm.input_layer(own.state.modules):
            # Under differential privacy, the input layer must not learn, because each case would influence how the
            # layer transforms other cases.
            data = passed_through(layer, data, learns=self.learns and self.private is None)
        return train_epoch(data, train_steps, compute, self.stop)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.trainer.in_order(self.trainer.data.train, self.stop)

    def count(self) -> int:
        own, place = self.trainer, self.trainer.context
        if own.private:
            return own.private.size
        return place.settings.resolution(patients_of(own.data.train), place.plan.task.synthetic).cases

    def labels(self) -> Sequence[int]:
        return self.trainer.labels()

    def told_loss(self, model: nn.Module) -> float | None:
        own = self.trainer
        data = own.in_order(own.train, self.stop)
        loss, _ = evaluate(model, data, own.loss, lambda output, target: {}, own.state.compute, self.stop)
        return own.disclosure.loss_within(loss, own.samples)

    def told_score(self, model: nn.Module) -> float | None:
        own = self.trainer
        if not own.disclosure.scores_within:
            return None
        whole = own.context.plan.algorithm.whole({**own.state.modules, "model": model})
        return own.disclosure.score_within(own.evaluation.evaluate(own.data.validation, self.stop, whole)[1])
