"""The course of a question at the server: one sum for table and curves, then steps of all regressions at once."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from medsilo_statistics.asked_question import Question
from medsilo_statistics.combat import CommonFeatures
from medsilo_statistics.describing import GroupMoments
from medsilo_statistics.found import MetaFound, OwnPart, StatisticsFound, TableColumn, apart, columns_of, curves_of
from medsilo_statistics.newton import Climb, Combined, FittedModel, combined
from medsilo_statistics.sums import ModelStep, Sums, SumStep

TABLE_BITS, STEP_BITS = 24, 6


class Adding(Protocol):
    """The hospitals, as they are asked for sums."""

    sites: list[str]
    sealed: bool
    floor: int

    def sum(self, step: SumStep) -> Sums:
        """Return sums over all hospitals."""

    def own(self) -> dict[str, OwnPart]:
        """Return what each hospital tells of itself."""

    def deviation(self, step: SumStep) -> float:
        """Return the standard deviation of the noise on each number of a sum."""


def answered(question: Question, hospitals: Adding, seconds: Callable[[], float]) -> StatisticsFound:
    """Ask for all that the question needs, and return its answer."""
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
        question=question.model_dump(mode="json"),
        hash=question.hash,
        sites=list(hospitals.sites),
        sealed=hospitals.sealed,
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
        seconds=seconds(),
    )


def _climbed(question: Question, hospitals: Adding, sums: Sums) -> list[FittedModel]:
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
            together: tuple[list[Combined], float] = combined(*zip(*told.values(), strict=True)) if told else ([], 0.0)
            found.append(
                MetaFound(model=number, term=term, sites=told, combined=together[0], inconsistency=together[1])
            )
    return found, remarks


def _needed(question: Question, column: TableColumn, name: str, half: float) -> float | None:
    """Return how many patients a 95 % interval of a mean, or of the most uncertain share, needs for this half width."""
    cell = column.cells.get(name)
    if cell is None or not cell.known:
        return None
    if not question.variables[name].levels:
        return None if cell.deviation is None else GroupMoments(cell.known, 0.0, cell.deviation).patients_for(half)
    shares = [own / cell.known for own in cell.levels if own is not None]
    spread = max((share * (1 - share) for share in shares), default=0.25)
    return GroupMoments(cell.known, 0.0, math.sqrt(spread)).patients_for(half)
