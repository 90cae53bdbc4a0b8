"""A site's side of a study: does what the coordinator asks, exactly, and keeps what never leaves.

No word here of how parcels travel, nor of what of a number may leave: the same participant works in a plain loop and
behind NVFlare, and layers stand around it (site_stack.py).
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict

from torch import Tensor, nn

from medsilo.core import optional
from medsilo.core.errors import DIVERGED, Refused
from medsilo.core.files import free_disk, sweep, write_json
from medsilo.core.tensors import Groups, Tensors
from medsilo.federation.checks import check_ranges
from medsilo.federation.disclosure import Disclosure, finite
from medsilo.federation.evaluation import Evaluation
from medsilo.federation.limits import check_disk, check_limits
from medsilo.federation.protection import Protection
from medsilo.federation.raw_results import (
    ExactDelivery,
    ExactMessage,
    ExactResult,
    ExactRound,
    ExactScores,
    ExactTest,
    write_measures,
)
from medsilo.federation.site_context import SiteContext, UpdateCodec, promises_privacy
from medsilo.federation.site_state import SiteState
from medsilo.federation.trainer import Trainer
from medsilo.learning.compute import Compute, Stop
from medsilo.learning.loop import evaluate
from medsilo.learning.seeds import seed_for
from medsilo.runs import paths
from medsilo.runs.messages import LETTERED, Request
from medsilo.runs.provenance import write_provenance
from medsilo.schedule.phase import Phase
from medsilo.schedule.site_end import SiteEnd
from medsilo.tasks.metrics import Measures
from medsilo.tasks.site_data import SiteData


class Participant:
    """One site of a study. Its state after a round lies in its folder, so any process may take over from there."""

    trainer_kind = Trainer

    def __init__(self, place: SiteContext, data: SiteData | None = None, envelope: UpdateCodec | None = None) -> None:
        """data: instead of those of the settings; envelope: what tensors travel in, by default none."""
        plan, folder, protection = place.plan, place.folder, Protection(place)
        sweep(folder, *(path for path in folder.glob("*") if path.is_dir()))
        compute = place.settings.compute()
        if data is None:
            protection.admit()
            with protection.fitting():
                data = plan.task.site_data(place.site, sorted(place.sites), plan.seed, protection.source())
        self.place, self.data = place, data
        self.envelope = envelope or UpdateCodec()
        self.warnings: list[str] = []  # what the lead should know of the answer that is being made
        numbers = (
            optional.PrivateNumbers.of(plan, place.site, place.settings, folder, data)
            if promises_privacy(place)
            else None
        )
        self.disclosure = Disclosure(place, data, protection, numbers)
        self.evaluation = self.evaluates(compute, protection.on)
        trained = self.disclosure.cases["train"] if place.trains else None
        patients = None if plan.task.mixes_patients else len(set(self.disclosure.patients["train"]))
        with protection.fitting():
            check_limits(plan, place.settings, plan.parameters, trained, free_disk(folder), patients)
        private = optional.PrivateSite(numbers, data.train) if numbers and place.trains else None
        self.state = SiteState(plan, place.site, folder, compute)
        tells = self._told_loss, self._told_score
        self.trainer = self.trainer_kind(place, data, self.state, protection, private, tells)
        with protection.fitting():
            self.trainer.check_averages()

    def evaluates(self, compute: Compute, protected: bool) -> Evaluation:
        """Return what scores models on this site's cases. protected: whether patients are behind them."""
        return Evaluation(self.place, self.data, compute, protected)

    def find(self, asked: Request, groups: Groups, stop: Stop) -> ExactResult:
        """Do what is asked. `stop` is asked before every batch and raises to end the work."""
        work = {"join": self._join, "round": self._round, "deliver": self._deliver, "test": self._test}
        work |= dict.fromkeys(LETTERED, lambda asked, groups, stop: ExactMessage(self.envelope.letter(asked)))
        doing, self.warnings = self.trainer.doing, []

        def step() -> None:
            stop()
            doing.step()

        with doing.answering(asked.task, asked.round):
            check_disk(self.place.folder)
            seed = seed_for(self.trainer.drawn_from, self.place.site, "work", asked.round)
            with self.state.compute.reproducible(seed):
                return work[asked.task](asked, groups, step)

    # ------------------------------------------------------------------ the kinds of work
    def _join(self, asked: Request, groups: Groups, stop: Stop) -> ExactResult:
        write_provenance(self.place.folder, self.place.plan, self.state.compute.description)
        if self.data.survey:
            write_json(self.place.folder / paths.DATA, asdict(self.data.survey))  # names files: it stays at the site
        return ExactResult()

    def _round(self, asked: Request, groups: Groups, stop: Stop) -> ExactRound:
        """Take over what was merged, validate it, train, and give back what this phase sends."""
        if not self.place.trains:
            raise Refused("this hospital does not train in this study (participation.evaluation_sites)")
        started, number, trainer = time.monotonic(), asked.round, self.trainer
        phase = self.place.plan.course.phase_of(number)
        self._stand_after(number - 1, asked)
        self._receive(asked, groups, phase)
        scored = self._validate(number - 1, stop)
        learns = phase.trains_at(self.place.site, number, self.place.trainers, self.place.plan.seed)
        loss = trainer.work(number, phase, stop) if learns else math.nan
        scored = self._scored_late(number - 1) or scored
        self.state.refuse_divergence(number)
        self._refuse_impossible(number, phase)
        self.envelope.check(asked, phase, self.state.modules)
        self.state.done = number
        self.state.save()
        self._write_row(number, phase.name, scored, time.monotonic() - started, train_loss=finite(loss))
        given = self.state.sent(phase) if learns else {}
        sent = self.envelope.seal(asked, phase, given, self.disclosure.samples(trainer.samples))
        return ExactRound(loss, trainer.samples, scored, groups=sent)

    def _deliver(self, asked: Request, groups: Groups, stop: Stop) -> ExactDelivery:
        """Take over and validate the outcome of the last round."""
        number, plan, folder = asked.round, self.place.plan, self.place.folder
        self._stand_after(number, asked)
        self._receive(asked, groups, plan.course.delivery)
        if not self.place.trains:
            part = self.data.train if self.disclosure.cases["train"] else self.data.test
            plan.algorithm.measure_unseen(self.state.modules, lambda: (x for x, _ in self.trainer.in_order(part, stop)))
        scored = self._validate(number, stop)
        self.state.refuse_divergence(number)
        self._write_row(number + 1, "deliver", scored, 0.0)
        self.evaluation.draw_inputs(plan.algorithm.input_layer(self.state.modules), folder)
        self.state.save_model(paths.LAST, number)
        return ExactDelivery(scored, plan.algorithm.outcome.take(self._end(stop), asked.outcome))

    def _test(self, asked: Request, groups: Groups, stop: Stop) -> ExactTest:
        """Test the selected model, once."""
        folder, outcome = self.place.folder, self.place.plan.algorithm.outcome
        selected = self._take_selected(asked, groups)
        self.state.save_model(paths.BEST, selected)
        end = self._end(stop)
        model = outcome.tested(end, self.state.model, asked.outcome)
        task = self.place.plan.task
        self.trainer.doing.begin("testing")
        scores = ExactScores(*self.evaluation.evaluate(self.data.test, stop, model, task.goal.measuring))
        told = outcome.after_test(end, model)
        self.evaluation.draw_found(model, self.state.modules["model"], scores.measures, folder)
        write_measures(folder, scores.measures, self.disclosure.patients["test"])  # of single cases: they stay here
        made_of = selected if told is None else asked.round  # an outcome is made of what was delivered
        return ExactTest(made_of, scores, self.decisive(model, stop), told)

    # ------------------------------------------------------------------ models
    def _take_selected(self, asked: Request, groups: Groups) -> int:
        """Take the selected model: the one the coordinator sends, the last, or this site's own choice; return its
        round."""
        self.state.reload()
        self.state.done = -1  # what lies in memory from here on is the model under test
        if self._chooses:
            return self.state.load_model(paths.BEST)["round"]
        self.state.load_model(paths.LAST)
        if not groups or asked.selected is None:
            return asked.round
        self.state.take_over(groups, self.place.plan.course.last, self.envelope.keeps_at_home)
        return asked.selected

    @property
    def _chooses(self) -> bool:
        plan = self.place.plan
        return plan.algorithm.outcome.personal and plan.model_selection.keep == "best"

    def decisive(self, model: nn.Module, stop: Stop) -> Measures | None:
        """Return the validation cases by which it is chosen from where on a probability counts as found; None where
        that is not told."""
        if not self.disclosure.tells_threshold:
            return None
        return self.evaluation.evaluate(self.data.validation, stop, model, self.place.plan.task.goal.measuring)[2]

    def _validate(self, rounds: int, stop: Stop) -> ExactScores | None:
        """Score the model as it is after so many rounds; a site that chooses for itself keeps it when it is best."""
        if not self.place.plan.validates(rounds):
            return None
        self.trainer.doing.begin("validating")
        if self.disclosure.cases["train"]:
            self.place.plan.algorithm.personalise(self.trainer.bench("personalise", rounds, stop))
        scored = self.disclosure.scored(rounds, *self.evaluation.evaluate(self.data.validation, stop, self.state.model))
        self._consider(rounds, scored)
        return scored

    def _consider(self, rounds: int, scored: ExactScores, model: Tensors | None = None) -> None:
        """Keep a model, by default the one that is there, where this site chooses for itself and has none better."""
        rank = self.disclosure.rank(rounds, scored)
        usable = self._chooses and self.place.plan.course.used_as_scored(rounds)
        if usable and (self.state.best is None or rank > self.state.best):
            self.state.best = rank
            self.state.save_model(paths.BEST, rounds, model)

    def _scored_late(self, rounds: int) -> ExactScores | None:
        """Return scores of the model as it arrived that are known only once it was trained; by default none."""
        return None

    def _end(self, stop: Stop) -> SiteEnd:
        """Return what an outcome works with; a site that did not train shows its images' spacing to no study."""
        place, disclosure = self.place, self.disclosure

        def validation() -> Iterator[tuple[Tensor, Tensor]]:
            cases = self.evaluation.pieces(self.data.validation, "super model")
            return self.evaluation.in_order(cases, self.state.modules["model"])

        return SiteEnd(
            place.plan,
            place.site,
            self.state.modules,
            place.folder,
            place.plan.task,
            self.state.compute,
            validation,
            [*disclosure.suppressed, *disclosure.noisy],
            disclosure.resolution,
            stop,
        )

    # ------------------------------------------------------------------ tensors in and out
    def _receive(self, asked: Request, groups: Groups, phase: Phase) -> None:
        self.state.done = -1  # until the work is whole, what lies in memory is the state after no round
        opened = self.envelope.open(asked, groups, self.state.modules)
        self.state.take_over(opened, phase, self.envelope.keeps_at_home)  # what it makes by itself is not sent

    def _refuse_impossible(self, number: int, phase: Phase) -> None:
        """Raise Refused for numbers that the server would refuse, while the reason is still known."""
        if not phase.trains:
            return
        for own in phase.sent:
            try:
                ranges = own.ranges(self.state.modules, self.place.plan.task)
                check_ranges(own.name, own.of(self.state.modules), ranges)
            except Refused as error:
                raise Refused(f"{DIVERGED} in round {number}: {error}; lower the learning rate") from error

    # ------------------------------------------------------------------ the state, and what the hospital reads
    def _stand_after(self, number: int, asked: Request) -> None:
        with self.trainer.protection.fitting():
            self.trainer.truncate(asked.train_cases)
        if warning := self.state.restore_after(number, asked.last):
            self.warnings.append(warning)

    def _write_row(
        self, number: int, phase: str, scored: ExactScores | None, seconds: float, **more: float | None
    ) -> None:
        found = (finite(scored.score), finite(scored.loss)) if scored else (None, None)
        metrics = dict(zip(("validation", "validation_loss"), found, strict=True)) | more
        self.state.write_row(number, phase, self.trainer.samples, metrics, seconds)

    # ------------------------------------------------------------------ within a round
    def _told_loss(self, model: nn.Module, stop: Stop) -> float | None:
        """Return a network's mean loss over the training cases as it may leave, and count it as told."""
        data = self.trainer.in_order(self.trainer.train, stop)
        loss, _ = evaluate(model, data, self.trainer.loss, lambda output, target: {}, self.state.compute, stop)
        return self.disclosure.loss_within(loss, self.trainer.samples)

    def _told_score(self, model: nn.Module, stop: Stop) -> float | None:
        """Return a network's score over the validation cases as it may leave, and count it as told."""
        if not self.disclosure.scores_within:
            return None
        whole = self.place.plan.algorithm.whole({**self.state.modules, "model": model})
        return self.disclosure.score_within(self.evaluation.evaluate(self.data.validation, stop, whole)[1])
