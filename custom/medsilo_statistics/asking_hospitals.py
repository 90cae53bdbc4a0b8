"""A question put to hospitals by a job: each adds up its patients, sealed where there are three hospitals or more.

What protects a hospital's patients, whatever the server says: it approves the question by its hash; it answers about as
many patients as its floor or not at all; its book holds the groups of patients of all sums against each other; sums
over other sets of hospitals must not leave one alone; answers are counted. With privacy there is noise instead of the
book, charged to the ledger before it leaves.
"""

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, Refused
from medsilo.federation.inquiry import Inquiry, SiteOfInquiry
from medsilo.federation.seams import Channel
from medsilo.privacy.mechanisms import Charge
from medsilo.privacy.noise import NoiseSource
from medsilo.runs.messages import Parcel
from medsilo_statistics.asked_question import MOST_STEPS, Question, RegressionAsked, read_question
from medsilo_statistics.course_of_question import (
    SEALED,
    BeginAnswer,
    Hospitals,
    StatisticsRequest,
    answered,
    noise_of,
    sums_of,
)
from medsilo_statistics.found import OwnPart, StatisticsFound, columns_of
from medsilo_statistics.newton import FittedModel, own_fit
from medsilo_statistics.patients import Floats, Patients, own_columns, read_patients
from medsilo_statistics.sums import ModelStep, Sums, SumStep, heaviest, of, sensitivity, table

METHOD, FILE = "statistics", "answers.json"
MOST_SUMS = 1 + MOST_STEPS
OF_CELL = 40  # values that a cell of a hospital's own table is, beside its levels


class StatisticsSite:
    """A hospital's side. It answers no question in clear where three hospitals or more are named."""

    def __init__(self, question: Question, own: SiteOfInquiry) -> None:
        self.question, self.own, self.settings = question, own, own.settings
        self.summed = own.summed(question.hash, question.sites) if question.sealed else None
        self.floor = self.settings.count_unit(synthetic=False)
        self.given = 0  # sums
        self._protected = False

    def answer(self, parcel: Parcel, stop: Callable[[], None] = lambda: None) -> Parcel:
        """Do what a parcel asks; raises Refused."""
        asked = StatisticsRequest.received(parcel.facts)
        self.own.check_package(asked.package)
        if asked.question != self.question.hash:
            raise Refused("the job's question at this site differs from the server's; submit the job again")
        self.own.check_approved(self.question.hash, self.question.sites, self.question.told())
        stop()
        if asked.task == "begin":
            return Parcel(facts=self._begin(asked).model_dump(mode="json"))
        if not self._protected:
            self._protect()
        if asked.task == "own":
            return Parcel(facts=self._alone().model_dump(mode="json"))
        if (asked.task == "seal") != bool(self.summed):
            raise Refused("the server: sums of three hospitals or more are sealed, those of fewer are not")
        if self.summed is None:
            return Parcel({SEALED: self._tensors(asked.step)})
        self.summed.check(asked)
        return self.summed.seal(asked, SEALED, self._tensors(asked.step), 2.0**asked.step.bits)

    # ------------------------------------------------------------------ what protects patients
    def _begin(self, asked: StatisticsRequest) -> BeginAnswer:
        self.given = 0
        self._protect()
        introduction = self.summed.introduction(asked) if self.summed else {}
        return BeginAnswer(introduction=introduction, floor=self.floor)

    def _protect(self) -> None:
        """Raise Refused unless the question may be answered; before anything leaves, also where it was never begun."""
        if (self.settings.privacy or self.question.privacy) and self.settings.protects(synthetic=False):
            self._admit()
        elif self.floor > 1:
            self._check_groups()
        self._protected = True

    def _admit(self) -> None:
        """Enter into the ledger what all answers may cost; raises Refused when that is not left."""
        if self.question.privacy is None:
            raise Refused(
                "this hospital answers only with noise (privacy in its medsilo.yaml); add privacy to the question"
            )
        planned = Charge.normal("all sums", noise_of(self.question), sums_of(self.question))
        self.own.charge(self.question.hash, METHOD, "", [planned], planned=True)

    def _check_groups(self) -> None:
        """Raise Refused where the question tells of too few patients, by itself or with earlier ones."""
        question, where = self.question, "(smallest_metric in its medsilo.yaml)"
        if 0 < len(self.patients) < self.floor:
            raise Refused(f"this hospital has fewer than {self.floor} patients of the question {where}; ask without it")
        if question.curves and not question.sealed:
            raise Refused("curves of fewer than three hospitals would show each one's events; ask three, or none")
        if question.sealed:
            cohort = self.own.book.number("\x1f".join(("cohort", *sorted(self.patients.names))))
            self.own.book.join_sum(f"{self.own.data} {cohort}", question.sites, self.own.study, 1)
        if of := self.own.book.divide(self.own.data, self._groups(), self.floor):
            raise Refused(
                f"with this and earlier questions, sums of {of} would tell of fewer than {self.floor} patients "
                f"{where}; ask about groups that differ in more, or in nobody"
            )

    def _groups(self) -> dict[str, list[set[str]]]:
        """Return the patients of each sum, by what is summed: this hospital's own columns."""
        question, names, found = self.question, self._own_names(), defaultdict[str, list[set[str]]](list)

        def add(told: Sequence[str], needed: tuple[str, ...], by: str | None = None) -> None:
            known = self.patients.known(needed)
            for name in told:
                found[name] += [set(known.only(mask).names) for mask in known.groups(by)]

        add(["patients"], (), question.by)
        for name in question.rows:
            add([names[name]], (name,), question.by)
        for curve in question.curves:
            add([names[curve.time], names[curve.event]], curve.variables, curve.by)
        together = [model.variables for model in question.models]
        together += [question.harmonise.variables] if question.harmonise else []
        for variables in together:
            add([names[name] for name in variables], variables)
        return found

    @cached_property
    def patients(self) -> Patients:
        """The patients whom the question is about."""
        if self.settings.data is None:
            raise Refused("this hospital's medsilo.yaml does not say where its data are; set 'data'")
        return read_patients(self.question, self.settings.data, self.own.name).asked

    # ------------------------------------------------------------------ what leaves
    def _tensors(self, step: SumStep) -> dict[str, Tensor]:
        """Return sums as they leave; with privacy with noise, which is on the ledger then."""
        self.given += 1
        if self.given > (sums_of(self.question) if self.question.privacy else MOST_SUMS):
            raise Refused("the server: it asks for more sums than the question takes; begin again")
        models = self.question.models
        for own in step.steps:
            if own.model >= len(models) or len(own.at) != self.question.width_of(models[own.model]):
                raise Refused("the server: a step is of no regression of the question")
            if models[own.model].meta == "only":
                raise Refused(f"the server: it asks for steps of model {own.model + 1}, which has hospitals' own alone")
            self._check_step(own)
        self.own.count_answer()
        sums = of(self.patients, step)
        if self.question.privacy:
            return self._noisy(sums, step)
        told = sums if self.summed or self.floor == 1 else self._without_few(sums)
        return {name: torch.from_numpy(np.ascontiguousarray(own)) for name, own in told.items()}

    def _check_step(self, step: ModelStep) -> None:
        """Raise Refused where a step looks at few patients, or is one more than Newton needs."""
        model = self.question.models[step.model]
        if self.floor == 1 or self.question.privacy or model.kind == "linear":
            return
        known = self.patients.known(model.variables)
        if heaviest(known, model, np.array(step.at)) > max(1 / self.floor, 3 / max(len(known), 1)):
            raise Refused(
                f"a step of model {step.model + 1} rests on fewer than {self.floor} patients here, as where a variable "
                "separates the outcome; leave that out, or join its levels"
            )
        names = self._own_names()
        of = "\x1f".join((self.own.data, *sorted(names[name] for name in model.variables), "", *sorted(known.names)))
        point = json.dumps([model.model_dump(mode="json", exclude={"meta"}), step.at])
        if not self.own.book.ask_point(of, point, MOST_STEPS):
            raise Refused(f"the server: it asked for steps at {MOST_STEPS} points of the same patients, and no more")

    def _own_names(self) -> dict[str, str]:
        assert self.settings.data
        return own_columns(self.question, self.settings.data, self.own.name)

    def _noisy(self, sums: Sums, step: SumStep) -> dict[str, Tensor]:
        noise, moved = noise_of(self.question), sensitivity(self.question, step)
        source = NoiseSource()
        found = {name: source.with_normal(torch.from_numpy(own), noise * moved) for name, own in sums.items()}
        if self.settings.protects(synthetic=False):
            what = f"sum {self.given} of {sums_of(self.question)}"
            self.own.charge(self.question.hash, METHOD, secrets.token_hex(16), [Charge.normal(what, noise)])
        return found

    def _without_few(self, sums: Sums) -> Sums:
        """Return sums in clear, NaN in place of what tells of fewer patients than the floor."""
        found = {}
        for name, own in sums.items():
            told = own.copy()
            if name.startswith("start "):
                told[:] = np.nan if self._begins_with_few(self.question.models[int(name.split()[1])], own) else own
            elif name == "harmonise":
                told[:] = np.nan if own[0] < self.floor else own
            elif name.startswith("row ") and self.question.variables[name[4:]].range:
                told[own[:, 0] < self.floor] = np.nan
            elif not name.startswith("model "):
                told[(own > 0) & (own < self.floor)] = np.nan
            found[name] = told
        return found

    def _alone(self) -> OwnPart:
        """Return what the hospital tells of itself alone: counts as multiples of its floor, and its own estimates."""
        question = self.question
        if question.privacy or not (question.by_hospital or any(model.meta for model in question.models)):
            raise Refused("the server: the question asks hospitals for nothing of their own")
        self.own.count_answer()
        sums, columns = table(self.patients), []
        if question.by_hospital:
            columns = columns_of(question, sums, self.floor, unit=self.floor)[-1:]  # of all its patients
        fits = {}
        for number, model in enumerate(question.models):
            if model.meta:
                start, few = sums[f"start {number}"], f"has fewer than {self.floor} patients or events"
                withheld = self._begins_with_few(model, start)
                own = FittedModel(terms=[], why=few) if withheld else own_fit(self.patients, model, start)
                fits[str(number)] = own
        return OwnPart(columns=columns, fits=fits)

    def _begins_with_few(self, model: RegressionAsked, start: Floats) -> bool:
        """Return whether a regression rests on fewer patients, or events, than the floor."""
        counted = 2 if model.kind in ("cox", "logistic") else 1
        return self.floor > 1 and bool((start[:counted] < self.floor).any())


def collected(question: Question, channel: Channel, sites: Sequence[str], timeout: float) -> dict[str, StatisticsFound]:
    """Return the answer of all hospitals, in one file."""
    try:
        return {FILE: answered(question, Hospitals(question, channel, sites, timeout))}
    except (ValueError, ArithmeticError, IndexError) as error:
        raise MedsiloError(
            "the hospitals' sums do not fit together, as those of patients do; ask two at a time to see whose it is",
            private=str(error),
        ) from error


def most_of(question: Question) -> tuple[int, int]:
    """Return how much a hospital may answer: sums, and values of its own table and estimates."""
    cells = len(question.rows) * len(question.levels_of(question.by))
    return question.values, 2 * question.values + OF_CELL * cells


INQUIRY = Inquiry(read_question, most_of, collected, StatisticsSite, leaves=Question.leaves)
SEALED_INQUIRY = Inquiry(read_question, most_of, collected, StatisticsSite, sealed=True)
