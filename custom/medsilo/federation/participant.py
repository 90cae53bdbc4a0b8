"""A site's side of a study: answers the coordinator's parcels, and keeps what never leaves.

No word here of how parcels travel: the same participant works in a plain loop and behind NVFlare.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from medsilo.core.errors import Refused
from medsilo.core.files import sweep, write_json
from medsilo.core.memory import forget_most, most_held
from medsilo.core.tensors import Groups, Tensors
from medsilo.course.group import views
from medsilo.course.outcome import SiteEnd
from medsilo.course.phase import Phase
from medsilo.federation.accepting import check_ranges, same_layout
from medsilo.federation.crew import Crew, why_alone
from medsilo.federation.doing import NowFile
from medsilo.federation.evaluation import Evaluation, Measuring
from medsilo.federation.limits import check_disk, check_limits, free_disk
from medsilo.federation.private_numbers import PrivateNumbers
from medsilo.federation.private_site import PrivateSite
from medsilo.federation.protection import Protection
from medsilo.federation.scoring import write_measures
from medsilo.federation.sealed.identity import KitFiles, signer_of
from medsilo.federation.sealed.sealed_site import SealedSite
from medsilo.federation.site_state import SiteState
from medsilo.federation.trainer import SHUFFLE, Trainer
from medsilo.learning.loop import Stop, evaluate
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.learning.team import ALONE
from medsilo.plan import Plan
from medsilo.privacy.mechanisms import Charge
from medsilo.runs import paths
from medsilo.runs.messages import ANSWERS, LETTERED, Parcel, Request
from medsilo.site.settings import SiteSettings
from medsilo.tasks.metrics import CHANCES, Measures
from medsilo.tasks.task import SiteData, patients_of

Metrics = dict[str, float | None]
Told = dict[str, Any]  # fields of an answer


class Participant(Trainer):
    """One site of a study. Its state after a round lies in its folder, so any process may take over from there."""

    def __init__(
        self,
        plan: Plan,
        site: str,
        sites: Sequence[str],
        settings: SiteSettings,
        folder: Path,
        data: SiteData | None = None,
        lead: str = "",
        kit: KitFiles | None = None,
    ) -> None:
        """lead: who submitted the study, as far as it is known; data: instead of those of the settings; kit: what the
        site signs with in a study that seals."""
        self.plan, self.site, self.sites, self.folder = plan, site, sorted(sites), folder
        sweep(folder, *(path for path in folder.glob("*") if path.is_dir()))
        self.compute, self.settings = settings.compute(), settings
        self.protection = Protection(plan, site, settings, folder, lead)
        if data is None:
            self.protection.admit()
            data = plan.task.site_data(site, self.sites, plan.seed, self.protection.source())
        self.data = data
        guarded = self.protection.on or settings.privacy is not None
        self.numbers = PrivateNumbers.of(plan, site, settings.privacy, guarded, folder, data)
        self.evaluation = Evaluation(plan, site, data, settings, self.compute, self.protection, self.numbers)
        self.cases = self.evaluation.cases
        self.trains = site not in plan.participation.unseen
        trained = self.cases["train"] if self.trains else None
        patients = None if plan.task.mixes_patients else len(set(self.evaluation.patients["train"]))
        check_limits(plan, settings, plan.parameters, trained, free_disk(folder), patients)
        self.train = self.data.train
        self._check_averages()
        self.private = PrivateSite.of(plan, site, settings.privacy, self.train, self.numbers) if self.trains else None
        if self.private and not plan.task.synthetic:
            self.secret = self.protection.book.number("draws")
        self.state = SiteState(plan, site, folder, self.compute)
        self.outcome = plan.algorithm.outcome
        self.chooses = self.outcome.personal and plan.tracking.select == "best"
        self.sealed = SealedSite(plan, site, folder, signer_of(kit)) if plan.transport.sealed else None
        self.validated: tuple[float, float, Measures] | None = None  # loss, score, and what was measured of each case
        self.noisy_score: float | None = None  # of the last validation, as it is told
        self.shares_out = False
        self.crew: Crew | None = None
        self.doing = NowFile(folder, device=str(self.compute.device))
        self.warnings: list[str] = []  # what the lead should know of the answer that is being made

    def share_out(self) -> None:
        """Train on all the devices of the site's settings, in this process and further ones."""
        if self.settings.processes == 1 or not self.trains:
            return
        why = why_alone(self.plan, self.state.modules, self.private is not None)
        if why and self.settings.devices != "auto":
            raise Refused(f"devices: batches of this plan can't be shared out, since {why}; or set devices: 1 there")
        if why:
            return
        for rank in range(self.settings.processes):
            self.settings.compute(rank)  # raises where there is no such device
        self.shares_out = True

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        """Do what a parcel asks and answer it. `stop` is asked before every batch and raises to end the work."""
        asked = Request.read(parcel.facts)

        def step() -> None:
            stop()
            self.doing.step()

        with self.doing.answering(asked.task, asked.round):
            return self._answer(parcel, asked, step)

    def _answer(self, parcel: Parcel, asked: Request, stop: Stop) -> Parcel:
        started = time.monotonic()
        forget_most()
        check_disk(self.folder, self.settings.limits)
        self.warnings = []
        work = {"join": self._join, "round": self._round, "deliver": self._deliver}
        work |= {"try": self._try, "test": self._test}
        work |= dict.fromkeys(LETTERED, self._answer_letters)
        with self.compute.reproducible(seed_for(self.drawn_from, self.site, "work", asked.round)):
            told, groups = work[asked.task](asked, parcel.groups, stop)
        common: Told = {
            "task": asked.task,
            "round": asked.round,
            "study": asked.study,
            "package": self.plan.code,
            "cases": self.evaluation.counted,
            "seconds": time.monotonic() - started,
            "memory": most_held(),
            "warnings": self.warnings,
            "withheld": self.evaluation.withheld,
            "noisy": self.evaluation.noisy,
        }
        reply = ANSWERS[asked.task](**common, **told).parcel(groups)
        reply.metrics = {
            name: self.settings.rounded(value) if isinstance(value, float) else value
            for name, value in reply.metrics.items()
        }
        return reply

    def charges(self, task: str, number: int) -> list[Charge]:
        """Return what an answer costs."""
        assert self.private and self.numbers
        trained = self.private.charges(number, self.plan.course.phase_of(number)) if task == "round" else []
        return [*trained, *self.numbers.charges(task, number)]

    def planned_charges(self) -> list[Charge]:
        """Return what all answers of the study cost."""
        assert self.private and self.numbers
        rounds = range(1, self.plan.rounds + 1)
        trained = [self.private.charges(number, self.plan.course.phase_of(number)) for number in rounds]
        return [*(charge for own in trained for charge in own), *self.numbers.planned()]

    def rest(self) -> None:
        """Let go of all networks: the next answer takes over from the folder."""
        self.state.rest()

    # ------------------------------------------------------------------ the four kinds of work
    def _join(self, asked: Request, groups: Groups, stop: Stop) -> tuple[Told, Groups]:
        if self.data.survey:
            write_json(self.folder / paths.DATA, asdict(self.data.survey))  # names files: it stays at the site
        most = self.plan.transport.sealing_counts
        if most and self.cases["train"] > most:
            raise Refused("this hospital has more training cases than transport.sealing_counts allows; raise it")
        self.warnings += [*self.protection.warnings(), *self._withholds()]
        shares = self.settings.shares(self.plan.task.synthetic) and self.sealed is None
        return {"shares": shares, "classes": self.evaluation.classes()}, {}

    def _answer_letters(self, asked: Request, groups: Groups, stop: Stop) -> tuple[Told, Groups]:
        if self.sealed is None:
            raise Refused("the server seals what this plan lets leave in clear")
        return {"sealing": self.sealed.answer(asked, groups)}, {}

    def _round(self, asked: Request, groups: Groups, stop: Stop) -> tuple[Told, Groups]:
        """Take over what was merged, validate it, train, and give back what this phase sends."""
        if not self.trains:
            raise Refused("this hospital does not train in this study (participation.unseen)")
        started, number = time.monotonic(), asked.round
        phase = self.plan.course.phase_of(number)
        self._truncate(asked.train_cases)
        self._stand_after(number - 1, asked.last)
        self.state.done = -1  # until the round is whole, what lies in memory is the state after no round
        self._receive(self._opened(asked, groups), phase)
        metrics = self._validate(number - 1, stop)
        learns = phase.trains_at(self.site, number, self._trainers, self.plan.seed)
        train_loss = self._train(number, phase, stop) if learns else math.nan
        metrics["train_loss"] = _number(train_loss)
        self.state.refuse_divergence(number)
        self._refuse_impossible(number, phase)
        if self.sealed:
            self.sealed.check(asked, phase, self.state.modules)
        self.state.done = number
        self.state.save()
        self.state.write_row(number, phase.name, self._samples(), metrics, time.monotonic() - started)
        told: Told = {**self._may_be_told()}
        told["train_loss"] = _number(self.evaluation.train_loss(train_loss, self._samples()))
        tells = self.validated is not None and self.evaluation.tells("validation")
        self.protection.note(train=told["train_loss"] is not None, validation=tells)
        samples = self.evaluation.samples(self._samples())
        given = self._give(phase) if learns else {}
        if self.sealed:
            given = self.sealed.seal(asked, phase, given, samples)
        return {"samples": 1 if self.evaluation.sealed_parts else samples, **told}, given

    def _refuse_impossible(self, number: int, phase: Phase) -> None:
        """Raise Refused for numbers that the server would refuse, while the reason is still known."""
        if not phase.trains:
            return
        for own in phase.sent:
            try:
                check_ranges(own.name, own.of(self.state.modules), own.ranges(self.state.modules, self.plan.task))
            except Refused as error:
                raise Refused(f"training diverged in round {number}: {error}; lower the learning rate") from error

    def _deliver(self, asked: Request, groups: Groups, stop: Stop) -> tuple[Told, Groups]:
        """Take over and validate the outcome of the last round."""
        number = asked.round
        self._truncate(asked.train_cases)
        self._stand_after(number, asked.last)
        self._receive(self._opened(asked, groups), self.plan.course.delivery)
        if not self.trains:
            part = self.data.train if self.cases["train"] else self.data.test
            self.plan.algorithm.measure_unseen(self.state.modules, (inputs for inputs, _ in self._in_order(part, stop)))
        metrics = self._validate(number, stop)
        self.state.refuse_divergence(number)
        self.state.write_row(number + 1, "deliver", self._samples(), metrics, 0.0)
        layer = self.plan.algorithm.input_layer(self.state.modules)
        self.evaluation.draw_inputs(layer, self.folder)
        self.state.save_model(paths.LAST, number)
        told = self.outcome.take(self._end(stop), asked.outcome)
        if self.evaluation.tells("validation"):
            self.protection.note(validation=1 + self.outcome.scores_besides)
        return {**self._may_be_told(), "outcome": told}, {}

    def _take_selected(self, asked: Request, groups: Groups) -> int:
        """Take the selected model: the one the coordinator sends, the last, or this site's own choice; return its
        round."""
        selected = asked.round
        self.state.wake()
        self.state.done = -1  # what lies in memory from here on is the model under test
        if self.chooses:
            selected = self.state.load_model(paths.BEST)["round"]
        else:
            self.state.load_model(paths.LAST)
            if groups and asked.selected is not None:
                selected = asked.selected
                self._receive(groups, self.plan.course.last)
        return selected

    def _try(self, asked: Request, groups: Groups, stop: Stop) -> tuple[Told, Groups]:
        """Try postprocessings of the selected model on the validation cases."""
        if not self.plan.trials or not self.trains:
            raise Refused("the plan asks this hospital for no trials of postprocessing")
        self._take_selected(asked, groups)
        trials = self.evaluation.trials(self._tried(self.state.model, stop))
        self.protection.note(validation=len(trials))
        return {"trials": trials}, {}

    def _tried(self, model: nn.Module, stop: Stop) -> Measures:
        """Return what postprocessings make of the validation cases."""
        self.doing.begin("validating")
        return self.evaluate(self.data.validation, stop, model, self.plan.task.trying)[2]

    def _test(self, asked: Request, groups: Groups, stop: Stop) -> tuple[Told, Groups]:
        """Test the selected model, once, with the postprocessing that all chose together, or this site for its own."""
        selected = self._take_selected(asked, groups)
        self.state.save_model(paths.BEST, selected)
        end = self._end(stop)
        model = self.outcome.tested(end, self.state.model, asked.outcome)
        choice, every = asked.postprocessing, self.plan.task.postprocessings
        if every and self.outcome.personal:
            choice = every.chosen(every.sums(self._tried(model, stop), 1))
        task = self.plan.task.with_postprocessing(choice)
        if choice:
            self.state.save_model(paths.BEST, selected, choice)
        self.doing.begin("testing")
        outcome = self.evaluate(self.data.test, stop, model, task.measuring)
        told = self.outcome.after_test(end, model)
        self.evaluation.draw_found(model, self.state.modules["model"], outcome[2], self.folder)
        if told is not None:
            selected = asked.round  # the outcome is made of what was delivered
        test = self.tested(selected, *outcome)
        threshold = self.threshold(model, stop) if CHANCES in test["counts"] else None
        self.protection.note(test=self.evaluation.tells("test"), validation=threshold is not None)
        return {**test, "threshold": threshold, "outcome": told}, {}

    def threshold(self, model: nn.Module, stop: Stop) -> float | None:
        """Return from where on a probability counts as found, by this site's validation cases; None if not told."""
        if not self.evaluation.tells_threshold:
            return None
        measures = self.evaluate(self.data.validation, stop, model, self.plan.task.measuring)[2]
        return self.evaluation.threshold(measures)

    def _end(self, stop: Stop) -> SiteEnd:
        """Return what an outcome works with; a site that did not train shows its images' spacing to no study."""
        trains = self.site in self.plan.participation.sites

        def validation() -> Iterator[tuple[Tensor, Tensor]]:
            cases = self.evaluation.pieces(self.data.validation, "super model")
            return self.evaluation.in_order(cases, self.state.modules["model"])

        return SiteEnd(
            self.plan,
            self.site,
            self.state.modules,
            self.folder,
            self.plan.task,
            self.compute,
            validation,
            self.data.spacings if trains and not (self.numbers and self.numbers.guarded) else (),
            self.settings.smallest_average,
            [*self.evaluation.withheld, *self.evaluation.noisy],
            self.evaluation.resolution,
            stop,
        )

    def tested(self, selected: int, loss: float, score: float, measures: Measures) -> Told:
        """Return what is told of the test: counts. What is measured of single test cases stays in this folder."""
        write_measures(self.folder, measures, self.evaluation.patients["test"])
        counts = {}
        if "test" in self.evaluation.noisy:
            loss, score = math.nan, self.evaluation.noisy_score("test", selected, measures)
        elif self.evaluation.tells("test"):
            counts = self.evaluation.counts(measures)
            loss, score = self.evaluation.loss("test", loss, measures), self.evaluation.score("test", score)
        else:
            loss = score = math.nan
        return {
            "test": _number(score),
            "test_loss": _number(loss),
            "test_cases": self.evaluation.counted.test,
            "selected": selected,
            "counts": counts,
        }

    def model_with(self, tensors: Tensors) -> nn.Module:
        """Return the study's model as another site has it, in place of this site's own."""
        self.state.wake()
        self.state.done = -1
        self.state.model.load_state_dict(tensors)
        return self.state.model

    def score(self, model: nn.Module, choice: Mapping[str, Any] = MappingProxyType({})) -> float | None:
        """Return a model's score on this site's test data. choice: the postprocessing that goes with it."""
        task = self.plan.task.with_postprocessing(choice)
        with self.compute.reproducible(self.plan.seed):
            judged = model.to(self.compute.device)
            return _number(self.evaluate(self.data.test, lambda: None, judged, task.measuring)[1])

    def _may_be_told(self) -> Metrics:
        """Return the last validation as it is told."""
        if self.validated is None or not self.evaluation.tells("validation"):
            return {"validation": None, "validation_loss": None}
        loss, score, measures = self.validated
        if self.noisy_score is not None:
            return {"validation": self.noisy_score, "validation_loss": None}
        told = {"validation": self.evaluation.score("validation", score)}
        told["validation_loss"] = self.evaluation.loss("validation", loss, measures)
        return {name: _number(value) for name, value in told.items()}

    def _withholds(self) -> list[str]:
        """Say of which parts nothing is told because another study had nearly the same patients in one."""
        least = self.evaluation.least
        return [
            f"no score over this hospital's {part} cases is told: they are those of an earlier study but for fewer "
            f"than {least} patients (smallest_metric in its medsilo.yaml)"
            for part in sorted(self.evaluation.too_near)
        ]

    # ------------------------------------------------------------------ tensors in and out
    @torch.no_grad()
    def _receive(self, groups: Groups, phase: Phase) -> None:
        """Put what arrived into the networks, in place: the optimizers keep hold of their parameters."""
        at_home = [own for own in phase.given if own.at_home] if self.sealed else []
        mine = views([own for own in phase.given if own not in at_home], self.state.modules)
        once = {group.name for group in phase.once}  # may be left out: the site has it
        same_layout(groups, {name: mine[name] for name in mine if name not in once or name in groups})
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                mine[group][name].copy_(tensor)
        for own in at_home:
            assert own.at_home
            trains = self.plan.participation.sites
            own.at_home(self.state.modules, trains.index(self.site) if self.site in trains else None)
        for own in phase.given:
            own.arrived(self.state.modules, own.name in groups)

    def _opened(self, asked: Request, groups: Groups) -> Groups:
        """Return what came, with what only this site or all hospitals can read opened."""
        if self.sealed is None:
            return groups
        opened = self.sealed.open(asked, groups, self.state.modules)
        if any(group in asked.sealing.get("held", {}) for group in groups):
            self.state.done = -1  # a personal model moves from where it stood: once
        return opened

    def _give(self, phase: Phase) -> Groups:
        """Return copies of what travels: training may go on in the originals while these are still on their way."""
        sent = views(phase.sent, self.state.modules)
        return {
            group: {name: self._copy(tensor) for name, tensor in tensors.items()} for group, tensors in sent.items()
        }

    def _copy(self, tensor: Tensor) -> Tensor:
        packed = self.plan.transport.packed(tensor).cpu()
        return packed.clone() if packed.data_ptr() == tensor.data_ptr() else packed

    # ------------------------------------------------------------------ training
    def _stand_after(self, number: int, last: int) -> None:
        warning = self.state.stand_after(number, last)
        if warning:
            self.warnings.append(warning)

    def _truncate(self, cases: int | None) -> None:
        """Train on so many cases, always the same ones, when the plan asks for sites of one size."""
        if not self.plan.training.truncate or cases is None or cases >= self.cases["train"]:
            self.train = self.data.train
            return
        seed, unit = self.plan.seed, self.evaluation.resolution["train"].unit
        if self.protection.on:  # always the same cases, in steps that are no single patient's
            seed, cases = self.protection.book.number("truncate"), max(cases // unit, 1) * unit
        drawn = torch.randperm(self.cases["train"], generator=generator_for(seed, self.site, "truncate"))
        self.train = Subset(self.data.train, sorted(drawn[: max(cases, 1)].tolist()))
        self._check_averages()

    def _check_averages(self) -> None:
        """Raise Refused unless an average that leaves the site covers as many images, and patients, as demanded."""
        least = self.settings.smallest_average
        if not self.trains:
            return
        for average in (group.average for phase in self.plan.course.phases for group in phase.sent):
            images = average.covers(self._samples(), self.plan.training) if average else least
            patients = len(set(patients_of(self.train))) if average and self.protection.on else images
            if min(images, patients) < least:
                raise Refused(
                    f"this plan averages {images} images of this site's {patients} patients, and no average of fewer "
                    f"than {least} leaves (smallest_average in its medsilo.yaml); bring more, or take another plan: a "
                    "larger training.batch_size for HarmoFL, algorithm.selector_sync=server-adam for FedSM"
                )

    def _train(self, number: int, phase: Phase, stop: Stop) -> float:
        if self.plan.training.optimizer_state == "reset":
            self.state.make_optimizers()
        for optimizer in self.state.optimizers.values():
            self.plan.training.begin_round(optimizer, number, self.plan.rounds)
        with self._together(number, phase):
            bench = self.bench(SHUFFLE, number, stop)
            if phase.trains:
                self.doing.begin("training", self.plan.training.steps_of_round(bench.steps))
            else:
                self.doing.begin("measuring")
            return phase.work(bench)

    @contextmanager
    def _together(self, number: int, phase: Phase) -> Iterator[None]:
        """Inside, this site's further processes train as this one does."""
        if not self.shares_out or not phase.trains:
            yield
            return
        crew = self.crew = self.crew or Crew(self, self.settings, self.folder)
        try:
            self.team = crew.begin(number)
            yield
            crew.finish()
        except Exception as error:
            self.crew, reason = None, crew.why(error)
            crew.close()
            raise reason from error
        finally:
            self.team = ALONE

    def _told_loss(self, model: nn.Module, stop: Stop) -> float | None:
        """Return a network's mean loss over the training cases as it may leave, and count it as told."""
        data = self._in_order(self.train, stop)
        loss, _ = evaluate(model, data, self._loss, lambda output, target: {}, self.compute, stop)
        told = _number(self.evaluation.train_loss(loss, self._samples()))
        self.protection.note(train=told is not None)
        return self.settings.rounded(told)

    def _told_score(self, model: nn.Module, stop: Stop) -> float | None:
        """Return a network's score over the validation cases as it may leave, and count it as told."""
        if not self.cases["validation"] or not self.evaluation.tells("validation") or self.evaluation.noisy:
            return None
        whole = self.plan.algorithm.whole({**self.state.modules, "model": model})
        score = self.evaluate(self.data.validation, stop, whole)[1]
        self.protection.note(validation=1)
        return self.settings.rounded(_number(self.evaluation.score("validation", score)))

    # ------------------------------------------------------------------ evaluation
    def _validate(self, rounds: int, stop: Stop) -> Metrics:
        """Score the model as it is after so many rounds; a site that chooses for itself keeps it when it is best."""
        self.validated, self.noisy_score = None, None
        if not self.plan.validates(rounds):
            return {"validation": None, "validation_loss": None}
        loss, score = math.nan, math.nan
        self.doing.begin("validating")
        measures: Measures = {}
        how = self.evaluation.chooses_by
        if self.cases["train"]:
            self.plan.algorithm.personalise(self.bench("personalise", rounds, stop))
        if self.cases["validation"]:
            loss, score, measures = self.evaluate(self.data.validation, stop, self.state.model)
            if how == "noisy":
                self.noisy_score = self.evaluation.noisy_score("validation", rounds, measures)
        self.validated = loss, score, measures
        rank = score if math.isfinite(score) else -sys.float_info.max
        if how != "exact":  # which round is chosen leaves: it follows from what is told, or is the last one
            rank = float(rounds) if self.noisy_score is None else self.noisy_score
        usable = self.chooses and self.plan.course.used_as_scored(rounds)
        if usable and (self.state.best is None or rank > self.state.best):
            self.state.best = rank
            self.state.save_model(paths.BEST, rounds)
        return {"validation": _number(score), "validation_loss": _number(loss)}

    def evaluate(
        self, part: Dataset, stop: Stop, model: nn.Module, measuring: Measuring | None = None
    ) -> tuple[float, float, Measures]:
        """Return mean loss, mean score, and what is measured of each case."""
        return self.evaluation.evaluate(part, stop, model, measuring)


def _number(value: float) -> float | None:
    """Return a number that JSON can hold; None stands for one that could not be computed, never 0."""
    return value if math.isfinite(value) else None
