"""The sums that a question needs of each hospital's patients. Those of all hospitals add up to those of all patients.

A step of a regression asks for its log likelihood, the gradient and the information at given coefficients.
"""

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from medsilo.runs.messages import Message
from medsilo_statistics.asked_question import Harmonised, Question, RegressionAsked
from medsilo_statistics.patients import Floats, Patients

Sums = dict[str, Floats]
FARTHEST, MOST_RATE = 200.0, 8.0
Coefficient = Annotated[float, Field(ge=-FARTHEST, le=FARTHEST)]


class ModelStep(Message):
    """A step of one regression. Coefficients are those of scaled numbers."""

    model: Annotated[int, Field(ge=0, le=19)]
    at: Annotated[list[Coefficient], Field(max_length=1000)]


class SumStep(Message):
    """A sum: that of table and curves first, then of steps of regressions."""

    steps: Annotated[list[ModelStep], Field(max_length=20)] = []  # none: the table
    bits: Annotated[int, Field(ge=10, le=40)] = 40  # no number is above 2^bits


def shapes(question: Question, step: SumStep) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of an answer."""
    steps = {f"model {own.model}": (question.step_of(question.models[own.model]),) for own in step.steps}
    return steps or question.shapes


def of(patients: Patients, step: SumStep) -> Sums:
    """Return a hospital's part. patients: those whom the question is about."""
    if not step.steps:
        return table(patients)
    found: Sums = {}
    for own in step.steps:
        model = patients.question.models[own.model]
        known = patients.known(model.variables)
        found[f"model {own.model}"] = regression(known, model, np.array(own.at))
    return found


def table(patients: Patients) -> Sums:
    """Return the sums of Table 1, of curves, and of where regressions begin."""
    question, groups = patients.question, patients.groups(patients.question.by)
    found: Sums = {"patients": np.array([mask.sum() for mask in groups], np.float64)}
    for name in question.rows:
        levels, own = question.variables[name].levels, patients.values[name]
        known = ~np.isnan(own)
        if levels:
            cells = [[(own[mask] == place).sum() for place in range(len(levels))] for mask in groups]
        else:
            scaled, count = np.where(known, patients.scaled(name), 0.0), question.variables[name].places
            cells = [[known[mask].sum(), scaled[mask].sum(), np.square(scaled[mask]).sum()] for mask in groups]
            bins = [np.bincount(patients.places(name)[mask & known], minlength=count) for mask in groups]
            found[f"histogram {name}"] = np.stack(bins).astype(np.float64)
        found[f"row {name}"] = np.array(cells, np.float64)
    for number, curve in enumerate(question.curves):
        known_ones = patients.known(curve.variables)
        found[f"curve {number}"] = np.stack(
            [_at_times(known_ones.only(mask), curve.time, curve.event) for mask in known_ones.groups(curve.by)]
        )
    for number, model in enumerate(question.models):
        those = patients.known(model.variables)
        y = outcome(those, model)
        found[f"start {number}"] = np.array([len(those), y.sum(), np.square(y).sum()], np.float64)
    if question.harmonise:
        found["harmonise"] = _around_own_means(patients.known(question.harmonise.variables), question.harmonise)
    return found


def _around_own_means(patients: Patients, asked: Harmonised) -> Floats:
    """Return patients, sums of covariates and features, and their products around this hospital's own means."""
    x, y = patients.columns(asked.covariates), patients.columns(asked.features)
    around_x, around_y = (own - own.mean(0) if len(own) else own for own in (x, y))
    products = (upper(around_x.T @ around_x), (around_x.T @ around_y).ravel(), np.square(around_y).sum(0))
    return np.concatenate([[len(patients)], x.sum(0), y.sum(0), *products])


def _at_times(patients: Patients, time: str, event: str) -> Floats:
    """Return how many events there are at each time, and how many patients are seen until then and no longer."""
    places, happened = patients.places(time), patients.values[event] == 1
    count = patients.question.variables[time].places
    return np.stack([np.bincount(places[own], minlength=count) for own in (happened, ~happened)], 1).astype(np.float64)


def outcome(patients: Patients, model: RegressionAsked) -> Floats:
    """Return what a regression explains: a scaled number, 0 or 1, a count over the greatest one, an event."""
    if model.kind == "linear" and model.outcome:
        return patients.scaled(model.outcome)
    if model.kind == "poisson" and model.outcome:
        own = patients.question.variables[model.outcome]
        return patients.values[model.outcome] / (own.middle + own.half)
    return (patients.values[model.outcomes[-1]] == 1).astype(np.float64)


def upper(square: Floats) -> Floats:
    """Return the upper triangle of matrices, row by row."""
    rows, places = np.triu_indices(square.shape[-1])
    return square[..., rows, places]


def whole(part: Floats, width: int) -> Floats:
    """Return symmetric matrices by their upper triangles."""
    rows, places = np.triu_indices(width)
    found = np.zeros((*part.shape[:-1], width, width))
    found[..., rows, places] = found[..., places, rows] = part
    return found


def regression(patients: Patients, model: RegressionAsked, at: Floats) -> Floats:
    """Return patients, log likelihood, gradient and information; of Cox the hospital's own partial likelihood.

    With privacy the log likelihood, which nothing bounds, is 0.
    """
    x, y, private = patients.matrix(model), outcome(patients, model), patients.question.privacy is not None
    if model.kind == "cox":
        assert model.time
        times, happened = patients.places(model.time), y > 0
        shown = np.unique(times[happened])
        risk, tied = risk_sums(x, times, happened, at, shown)
        counts = np.array([(times[happened] == time).sum() for time in shown], np.float64)
        return partial_likelihood(risk, tied, counts, x[happened].sum(0), at, model.ties)
    eta, weight = x @ at, weights(x, model, at, private)
    if model.kind == "linear":
        fitted, likelihood = eta, -float(np.square(y - eta).sum()) / 2
    elif model.kind == "logistic":
        fitted, likelihood = 0.5 * (1 + np.tanh(eta / 2)), float((y * eta - np.logaddexp(0, eta)).sum())
    else:
        fitted, likelihood = weight, float((y * eta - weight).sum())
    told = [len(y), 0.0 if private else likelihood]
    return np.concatenate([told, x.T @ (y - fitted), upper((x * weight[:, None]).T @ x)])


def weights(x: Floats, model: RegressionAsked, at: Floats, private: bool) -> Floats:
    """Return how much each patient weighs in a step. private: rates are cut at the greatest count, which is 1."""
    eta = x @ at
    if model.kind == "linear":
        return np.ones(len(x))
    if model.kind == "logistic":
        return 0.25 - np.square(np.tanh(eta / 2)) / 4
    if model.kind == "poisson":
        return np.exp(np.minimum(eta, 0.0 if private else np.log(MOST_RATE)))
    return np.exp(np.clip(eta, -30.0, 12.0))


def heaviest(patients: Patients, model: RegressionAsked, at: Floats) -> float:
    """Return the greatest share that one patient has in a step's weights."""
    own = weights(patients.matrix(model), model, at, False)
    return float(own.max(initial=0.0) / max(own.sum(), 1e-300))


def risk_sums(
    x: Floats, times: NDArray[np.int64], happened: NDArray[np.bool_], at: Floats, shown: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return sums of weights, weighted x and x x' at each shown time: of who is at risk, of who has the event."""
    weight = np.exp(np.clip(x @ at, -30.0, 12.0))[:, None]
    own = np.concatenate([weight, weight * x, weight * upper(x[:, :, None] * x[:, None, :])], 1)
    order = np.argsort(-times, kind="stable")
    added = np.concatenate([np.zeros((1, own.shape[1])), np.cumsum(own[order], 0)])
    risk = added[np.searchsorted(-times[order], -shown, side="right")]
    tied = np.zeros_like(risk)
    place = np.minimum(np.searchsorted(shown, times), max(len(shown) - 1, 0))
    here = happened & (shown[place] == times) if len(shown) else np.zeros(len(times), bool)
    np.add.at(tied, place[here], own[here])
    return risk, tied


def partial_likelihood(risk: Floats, tied: Floats, counts: Floats, covariates: Floats, at: Floats, ties: str) -> Floats:
    """Return events, log partial likelihood, gradient and information.

    counts: events at each time; covariates: the sum of x over all events. With Efron's ties the l-th of d tied events
    has left l / d of the tied ones behind; with Breslow's nobody has left.
    """
    width = len(at)
    most = int(counts.max(initial=0))
    likelihood, gradient, information = float(covariates @ at), covariates.copy(), np.zeros(width * (width + 1) // 2)
    for turn in range(most):
        here = counts > turn
        share = (turn / counts[here])[:, None] if ties == "efron" else 0.0
        left = risk[here] - share * tied[here]
        total, mean = left[:, 0], left[:, 1 : 1 + width] / left[:, :1]
        likelihood -= float(np.log(total).sum())
        gradient -= mean.sum(0)
        square = left[:, 1 + width :] / left[:, :1] - upper(mean[:, :, None] * mean[:, None, :])
        information += square.sum(0)
    return np.concatenate([[counts.sum(), likelihood], gradient, information])


def sensitivity(question: Question, step: SumStep) -> float:
    """Return how far one patient moves an answer at most, in Euclidean length."""
    square = 0.0
    for name, shape in shapes(question, step).items():
        kind, _, number = name.partition(" ")
        if kind == "model":
            model = question.models[int(number)]
            width, own = question.width_of(model), 0.25 if model.kind == "logistic" else 1.0
            square += 1 + width + own**2 * width * (width + 1) / 2
        elif kind == "start":
            square += shape[0]
        else:  # the patient counts in one place; of a number its own and its square's, too
            square += 3 if kind == "row" and question.variables[number].range else 1
    return float(np.sqrt(square))
