"""The course of a question at the server: one sum for table and curves, then steps of all regressions at once."""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from medsilo.core.errors import MedsiloError, Refused
from medsilo.core.package import package_facts
from medsilo.federation.inquiry import SealedSums, SumRequest
from medsilo.federation.seams import Channel
from medsilo.privacy.accounting import noise_for
from medsilo.runs.messages import Message, Parcel
from medsilo_statistics.asked_question import Question
from medsilo_statistics.combat import CommonFeatures
from medsilo_statistics.describing import NORMAL
from medsilo_statistics.found import MetaFound, OwnPart, StatisticsFound, TableColumn, apart, columns_of, curves_of
from medsilo_statistics.newton import PRIVATE_STEPS, Climb, FittedModel, combined
from medsilo_statistics.sums import ModelStep, Sums, SumStep, sensitivity, shapes

SEALED = "statistics"  # the group in which sums travel
TABLE_BITS, STEP_BITS = 24, 6
KIND = torch.float64, torch.strided  # of sums in clear


class StatisticsRequest(SumRequest):
    """A question of the server to a hospital."""

    question: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    package: dict[str, Any]
    timeout: Annotated[float, Field(gt=0)] = 604_800
    task: Literal["begin", "seal", "sum", "own"]
    step: SumStep = SumStep()


class BeginAnswer(Message):
    """A hospital's answer when a question begins."""

    introduction: dict[str, Any] = {}
    floor: Annotated[int, Field(ge=1, le=1000)]


def noise_of(question: Question) -> float:
    """Return the noise of each sum over what one patient changes; 0 without privacy."""
    if question.privacy is None:
        return 0.0
    return noise_for(question.privacy.epsilon, question.privacy.delta, 1.0, sums_of(question))


def sums_of(question: Question) -> int:
    """Return how many sums a question with privacy takes."""
    kinds = {model.kind for model in question.models}
    return 1 + (PRIVATE_STEPS if kinds - {"linear"} else len(kinds))


class Hospitals:
    """The server's side: all hospitals, whose sums it reads."""

    def __init__(self, question: Question, channel: Channel, sites: Sequence[str], timeout: float) -> None:
        self.question, self.channel, self.timeout = question, channel, timeout
        self.sites, self.package = sorted(question.sites or sites), package_facts()
        self.sums = SealedSums(question.hash, question.sites, self._ask) if question.sealed else None
        self.study, self.number, self.floor = self.sums.study if self.sums else secrets.token_hex(16), 0, 1

    def begin(self) -> None:
        """Ask for keys, and how few patients each tells of."""

        def begun(site: str, reply: Parcel) -> None:
            told = BeginAnswer.received(reply.facts)
            self.floor = max(self.floor, told.floor)
            if self.sums:
                self.sums.introduce(site, told.introduction)

        self._ask("begin", begun)

    def sum(self, step: SumStep) -> Sums:
        """Return the sums over all hospitals."""
        self.number += 1
        wanted = shapes(self.question, step)
        if self.sums:
            added = self.sums.sum(self.number, SEALED, wanted, 2.0**step.bits, step=step)
            return {name: own.numpy() for name, own in added.items()}
        parts: dict[str, Sums] = {}

        def received(site: str, reply: Parcel) -> None:
            own, most = reply.groups.get(SEALED, {}), 2.0**step.bits
            kinds = {(each.dtype, each.layout) for each in own.values()}
            if {name: tuple(each.shape) for name, each in own.items()} != wanted or kinds - {KIND}:
                raise Refused("its sums are not those that it was asked for")
            parts[site] = {name: each.detach().cpu().numpy() for name, each in own.items()}
            for each in parts[site].values():
                # NaN stands for what a hospital withholds, which it does once, before any step.
                if (np.abs(each) > most).any() or (step.steps and np.isnan(each).any()):
                    raise Refused(f"its sums are beyond {most:g}, which no patients can make")

        self._ask("sum", received, sum=self.number, step=step)
        return {name: np.sum([parts[site][name] for site in sorted(parts)], 0) for name in wanted}

    def own(self) -> dict[str, OwnPart]:
        """Return what each hospital tells of itself."""
        found: dict[str, OwnPart] = {}

        def received(site: str, reply: Parcel) -> None:
            found[site] = OwnPart.received(reply.facts)

        self._ask("own", received)
        return dict(sorted(found.items()))

    def deviation(self, step: SumStep) -> float:
        """Return the standard deviation of the noise on each number of a sum."""
        return noise_of(self.question) * sensitivity(self.question, step) * math.sqrt(len(self.sites))

    def _ask(
        self, task: str, receive: Callable[[str, Parcel], None], letters: Mapping[str, Any] | None = None, **about: Any
    ) -> None:
        def outgoing(site: str) -> Parcel:
            own = {"task": task, "study": self.study, "letter": (letters or {}).get(site, {}), **about}
            asked = StatisticsRequest(question=self.question.hash, package=self.package, timeout=self.timeout, **own)
            return Parcel(facts=asked.model_dump(mode="json"))

        if missing := self.channel.ask(self.sites, outgoing, receive, self.timeout):
            why = "; ".join(f"{site} {gone.text}" for site, gone in sorted(missing.items()))
            raise MedsiloError(f"the question needs all hospitals: {why}")


def answered(question: Question, hospitals: Hospitals) -> StatisticsFound:
    """Ask for all that the question needs, and return its answer."""
    hospitals.begin()
    first = SumStep(bits=TABLE_BITS)
    sums, deviation = hospitals.sum(first), hospitals.deviation(first)
    floor = 1 if question.privacy else hospitals.floor
    columns = columns_of(question, sums, floor, deviation**2)
    fits = _climbed(question, hospitals, sums)
    alone = question.by_hospital or any(model.meta for model in question.models)
    own = hospitals.own() if alone else {}
    meta, remarks = _meta(question, own)
    few = [f"{column.title}: fewer than {floor} patients" for column in columns if column.patients is None]
    return StatisticsFound(
        question=question,
        hash=question.hash,
        sites=list(hospitals.sites),
        sealed=question.sealed,
        floor=floor,
        deviation=deviation,
        columns=columns,
        apart=apart(question, columns[:-1]),
        sites_apart=apart(question, [part.columns[-1] for part in own.values() if part.columns]),
        wanted={name: _needed(question, columns[-1], name, half) for name, half in question.wanted.items()},
        curves=[
            curves_of(question, curve, sums[f"curve {n}"], floor, deviation**2)
            for n, curve in enumerate(question.curves)
        ],
        fits=fits,
        meta=meta,
        common=CommonFeatures.of(question, sums["harmonise"]) if question.harmonise else None,
        own=own,
        remarks=[*few, *(f"model {n + 1} {fit.why}" for n, fit in enumerate(fits) if fit.why), *remarks],
    )


def _climbed(question: Question, hospitals: Hospitals, sums: Sums) -> list[FittedModel]:
    """Return all regressions, a step of each in every sum."""
    climbs = []
    for number, model in enumerate(question.models):
        # The noise is known before the first step: it does not depend on the coefficients.
        step = SumStep(steps=[ModelStep(model=number, at=[])]) if question.privacy else SumStep()
        climb = Climb(question, model, sums[f"start {number}"], hospitals.deviation(step) ** 2)
        if hospitals.floor > 1 and 0 < climb.start[0] < hospitals.floor and not question.privacy:
            climb.why, climb.done = f"has fewer than {hospitals.floor} patients with all its variables", True
        if model.meta == "only":
            climb.why, climb.done = "is of hospitals' own estimates alone, as was asked", True
        climbs.append(climb)
    most = 2.0 ** (4 + STEP_BITS) * max(float(np.nan_to_num(sums["patients"]).sum()), 2.0)
    while climbing := [number for number, climb in enumerate(climbs) if not climb.done]:
        asked = [ModelStep(model=number, at=climbs[number].at.tolist()) for number in climbing]
        room = most + 16 * hospitals.deviation(SumStep(steps=asked))
        answer = hospitals.sum(SumStep(steps=asked, bits=min(40, math.ceil(math.log2(room)))))
        for number in climbing:
            climbs[number].take(answer[f"model {number}"])
    return [climb.fit() for climb in climbs]


def _meta(question: Question, own: dict[str, OwnPart]) -> tuple[list[MetaFound], list[str]]:
    """Return hospitals' estimates together, and which hospitals have none, with the reason."""
    found, remarks = [], []
    for number, model in enumerate(question.models):
        fits = {site: part.fits[str(number)] for site, part in own.items() if str(number) in part.fits}
        remarks += [f"model {number + 1} at {site} alone {fit.why}" for site, fit in fits.items() if fit.why]
        able = {site: fit for site, fit in fits.items() if not fit.why}
        if not model.meta or not able:
            continue
        terms = next(iter(able.values())).terms
        for place, term in enumerate(terms):
            told = {
                site: [fit.coefficients[place], fit.errors[place]]
                for site, fit in able.items()
                if fit.terms == terms and len(fit.coefficients) > place and fit.errors[place] > 0
            }
            estimates, differing = combined(*zip(*told.values(), strict=True)) if told else ([], 0.0)
            found.append(MetaFound(model=number, term=term, sites=told, combined=estimates, inconsistency=differing))
    return found, remarks


def _needed(question: Question, column: TableColumn, name: str, half: float) -> float | None:
    """Return how many patients a 95 % interval of a mean, or of the most uncertain share, needs for this half width."""
    cell = column.cells.get(name)
    if cell is None or not cell.known:
        return None
    shares = [own / cell.known for own in cell.levels if own is not None]
    uncertain = math.sqrt(max((share * (1 - share) for share in shares), default=0.25))
    deviation = uncertain if question.variables[name].levels else cell.deviation
    return None if deviation is None else float(np.ceil((NORMAL * deviation / half) ** 2))
