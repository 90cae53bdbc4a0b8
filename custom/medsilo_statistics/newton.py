"""Regressions of sums: Newton's steps, their end in the variables' own units, and hospitals' estimates together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from medsilo.runs.messages import Message
from medsilo_statistics.asked_question import MOST_STEPS, Question, RegressionAsked
from medsilo_statistics.describing import NORMAL
from medsilo_statistics.patients import Floats, Patients
from medsilo_statistics.sums import regression, whole

CLOSE, SINGULAR, SLIPPED = 1e-8, 1e-10, 1e-9
FAR = 50.0  # of a scaled coefficient
PRIVATE_STEPS = 4
BURIED = "has too few patients for the noise; offer more ε, or fewer variables"


class FittedModel(Message):
    """A fitted regression, in the variables' own units."""

    terms: list[str] = Field(max_length=1000)
    coefficients: list[float] = Field([], max_length=1000)
    covariance: list[list[float]] = Field([], max_length=1000)
    patients: float = 0
    events: float | None = None  # of categories and of Cox
    likelihood: float | None = None
    steps: int = 0
    why: str = Field("", max_length=400)  # there are no coefficients

    @property
    def errors(self) -> list[float]:
        """Standard errors."""
        return [float(np.sqrt(max(own[place], 0.0))) for place, own in enumerate(self.covariance)]


@dataclass
class Climb:
    """Newton's steps of one regression: it is told sums at `at`, and says where it wants them next."""

    question: Question
    model: RegressionAsked
    start: Floats  # patients, sum and square sum of the outcome
    noise: float = 0.0  # variance of each number of a sum
    at: Floats = field(init=False)
    why: str = ""
    done: bool = False
    steps: int = 0
    likelihood: float = -np.inf
    inverse: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.terms = [] if self.model.kind == "cox" else ["intercept"]
        for name in self.model.covariates:
            levels = [*self.question.variables[name].levels]
            self.terms += [f"{name} = {level}" for level in levels[1:]] or [name]
        self.at = self._from = np.zeros(len(self.terms))
        patients, explained = self.start[0], self.start[1]
        if not np.isfinite(self.start).all():
            self._fail("is withheld: a hospital has too few patients or events for it")
        if self.model.kind == "poisson" and patients >= 1:
            self.at[0] = np.log(max(explained / patients, 1e-3))
        if self.noise or self.done:
            return
        if patients <= len(self.terms):
            self._fail(f"has {patients:g} patients with all its variables for {len(self.terms)} coefficients")
        elif self.model.kind != "linear" and explained <= 0:
            self._fail("has no event" if self.model.kind == "cox" else "has an outcome that is 0 for all")
        elif self.model.kind == "logistic" and explained >= patients:
            self._fail("has an outcome that is the same for all")

    def _fail(self, why: str) -> None:
        self.why, self.done = why, True

    def take(self, sums: Floats) -> None:
        """Take patients or events, log likelihood, gradient and information at `at`."""
        width = len(self.at)
        self.steps += 1
        likelihood, gradient, information = float(sums[1]), sums[2 : 2 + width], whole(sums[2 + width :], width)
        if not self.noise and self.steps > 1 and likelihood < self.likelihood - SLIPPED * (1 + abs(likelihood)):
            self.at = (self.at + self._from) / 2
            if self.steps >= MOST_STEPS:
                self._fail(self._endless())
            return
        inverse = self._inverse(information)
        if inverse is None:
            return
        self.likelihood, self.inverse = likelihood, inverse
        move = inverse @ gradient
        far = float(np.abs(move / (1 + np.abs(self.at))).max(initial=0.0))
        self._from, self.at = self.at, self.at + move
        enough = 1 if self.model.kind == "linear" else PRIVATE_STEPS if self.noise else MOST_STEPS
        if far < CLOSE or self.model.kind == "linear" or (self.noise and self.steps >= enough):
            self.done = True
        elif np.abs(self.at).max() > FAR or self.steps >= enough:
            self._fail(self._endless())

    def _endless(self) -> str:
        worst = self.terms[int(np.abs(self.at).argmax())]
        return f"has no finite maximum: {worst!r} separates the outcome; leave it out, or join its levels"

    def _inverse(self, information: Floats) -> Floats | None:
        """Return the inverse; None, with the reason, where the columns depend on each other."""
        size = np.sqrt(np.maximum(np.diag(information), 0))
        if size.min(initial=1.0) <= SINGULAR * max(size.max(initial=0.0), 1.0):
            worst = self.terms[int(size.argmin())]
            self._singular(f"has a covariate that is the same for all: {worst!r}; leave it out")
            return None
        values, vectors = np.linalg.eigh(information / np.outer(size, size))
        if values[0] < SINGULAR:
            own = [name for name, part in zip(self.terms, vectors[:, 0], strict=True) if abs(part) > 0.1]
            self._singular(f"has covariates that follow from each other: {', '.join(own[:6])}; leave one out")
            return None
        return (vectors / values) @ vectors.T / np.outer(size, size)

    def _singular(self, early: str) -> None:
        """End without an inverse. early: the reason at the first step; later, steps have gone too far."""
        self._fail(BURIED if self.noise else early if self.steps == 1 else self._endless())

    def fit(self) -> FittedModel:
        """Return what it ended with, in the variables' own units."""
        counted = self.model.kind in ("cox", "logistic")
        patients, explained = np.nan_to_num(self.start[:2]).tolist()  # 0: withheld
        told = FittedModel(terms=self.terms, patients=patients, events=explained if counted else None, steps=self.steps)
        if self.why:
            return told.model_copy(update={"why": self.why})
        own, covariance = self._natural()
        values = {"coefficients": own.tolist(), "covariance": covariance.tolist()}
        return told.model_copy(update=values | ({} if self.noise else {"likelihood": self.likelihood}))

    def _natural(self) -> tuple[Floats, Floats]:
        """Return coefficients and covariance of unscaled numbers."""
        turn, shift, place = np.eye(len(self.at)), np.zeros(len(self.at)), int(self.model.kind != "cox")
        for name in self.model.covariates:
            variable = self.question.variables[name]
            if variable.range:
                turn[place, place] = 1 / variable.half
                if self.model.kind != "cox":
                    turn[0, place] = -variable.middle / variable.half
            place += variable.columns
        spread = self.inverse
        if self.model.kind == "linear":
            assert self.model.outcome
            outcome = self.question.variables[self.model.outcome]
            # The residuals' square: y'y - at' X'y, where X'y is the information at the end times at.
            rest = self.start[2] - float(self.at @ np.linalg.solve(self.inverse, self.at))
            free = max(self.start[0] - len(self.at), 1.0)
            spread = self.inverse * max(rest, 0.0) / free
            turn, shift[0] = turn * outcome.half, outcome.middle
        elif self.model.kind == "poisson":
            assert self.model.outcome
            most = self.question.variables[self.model.outcome].middle + self.question.variables[self.model.outcome].half
            spread, shift[0] = spread / most, np.log(most)
        spread = spread + self.noise * self.inverse @ self.inverse  # that of the last gradient
        return turn @ self.at + shift, turn @ spread @ turn.T


def own_fit(patients: Patients, model: RegressionAsked, start: Floats) -> FittedModel:
    """Return the regression of one hospital's patients alone. start: its sums of where it begins."""
    climb, known = Climb(patients.question, model, start), patients.known(model.variables)
    while not climb.done:
        climb.take(regression(known, model, climb.at))
    return climb.fit()


class Combined(Message):
    """Hospitals' estimates of one coefficient together."""

    method: str = Field(max_length=40)
    estimate: float
    low: float
    high: float
    tau2: float = 0.0


def combined(estimates: Sequence[float], errors: Sequence[float]) -> tuple[list[Combined], float]:
    """Return the estimates of hospitals together, and I². DerSimonian and Laird's, and Hartung and Knapp's interval."""
    from scipy.special import stdtrit

    y, v = np.array(estimates), np.square(errors)
    count, weight = len(y), 1 / np.square(errors)
    fixed = float(weight @ y / weight.sum())
    q = float(weight @ np.square(y - fixed))
    tau2 = max(0.0, (q - (count - 1)) / (weight.sum() - np.square(weight).sum() / weight.sum())) if count > 1 else 0.0
    own = 1 / (v + tau2)
    mean, error = float(own @ y / own.sum()), float(1 / np.sqrt(own.sum()))
    found = [
        _combined("fixed", fixed, NORMAL / np.sqrt(weight.sum())),
        _combined("DerSimonian-Laird", mean, NORMAL * error, tau2),
    ]
    if count > 1:
        spread = np.sqrt(own @ np.square(y - mean) / ((count - 1) * own.sum()))
        found.append(_combined("Hartung-Knapp", mean, float(stdtrit(count - 1, 0.975) * spread), tau2))
    return found, max(0.0, 1 - (count - 1) / q) if q > 0 else 0.0


def _combined(method: str, mean: float, half: float, tau2: float = 0.0) -> Combined:
    return Combined(method=method, estimate=mean, low=mean - float(half), high=mean + float(half), tau2=float(tau2))
