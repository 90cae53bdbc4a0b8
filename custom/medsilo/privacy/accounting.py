"""Compute the privacy cost ε of several releases at a given δ, from the privacy loss distributions of Google's
dp-accounting.

The estimate is pessimistic: privacy losses are rounded so that the computed ε is never below the true ε.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.privacy.mechanisms import (
    MOST_COUNT,
    MOST_NOISE,
    Charge,
    Gaussian,
    Geometric,
    Mechanism,
    Public,
    SampledGaussian,
)

# The grid of privacy losses is as coarse as possible for an error of ε below 1e-3. The grid has POINTS points, but more
# points if the losses of a single training step would otherwise fall between two points.
POINTS, MOST_POINTS = 1 << 16, 1 << 19
WITHIN = 1 / 32  # largest step of the grid, as a fraction of the standard deviation of a single training step's loss
FINEST, COARSEST = 2.0**-26, 2.0**-4  # if the privacy losses exceed the coarsest grid, ε is infinite
TAIL = 12.0  # half of the width of a distribution, in standard deviations
ROUGH = 1.001  # the search may find a noise that is up to this many times as large as the least sufficient noise

# mechanisms that are accounted together have the same key: kind, noise, rate and sensitivity
Part = tuple[str, float, float, int]
Parts = tuple[tuple[Part, int], ...]


def epsilon(charges: Iterable[Charge], delta: float) -> float:
    return epsilon_of(counted(charges), delta)


def epsilon_of(used: Mapping[Mechanism, int], delta: float) -> float:
    if not 1e-12 <= delta < 1:
        raise MedsiloError(f"δ = {delta:g} is out of range; give a number from 1e-12 to less than 1")
    parts = _parts(used)
    return math.inf if _step(parts) > COARSEST else _epsilon(parts, delta)


def noise_for(epsilon: float, delta: float, rate: float, steps: int, charges: Sequence[Charge] = ()) -> float:
    """Return the least noise multiplier, accurate to a thousandth, with which all training steps and all other releases
    together cost at most ε at δ.

    The noise multiplier is the noise's standard deviation, divided by the largest L2 change that one privacy unit can
    cause. With the sampling rate 1, each training step is a release that uses all privacy units. Raises MedsiloError if
    no noise is sufficient.
    """

    def cost(noise: float) -> float:
        steps_at = Charge(what="steps", of=SampledGaussian(noise=noise, rate=rate, steps=steps))
        return epsilon_of(counted([*charges, steps_at]), delta)

    if epsilon_of(counted(charges), delta) >= epsilon:
        raise MedsiloError(_no_noise(f"{steps} steps", epsilon, delta))
    return _least(cost, f"{steps} steps", epsilon, delta)


def geometric_for(epsilon: float, delta: float, count: int, sensitivity: int) -> float:
    """Return the least scale of geometric noise, accurate to a thousandth, with which all releases together cost at
    most ε at δ.

    The scale of the noise is relative to the sensitivity of a release, which is the largest change that one privacy
    unit can cause. Raises MedsiloError if no noise is sufficient.
    """

    def cost(scale: float) -> float:
        return epsilon_of({Geometric(scale=scale, sensitivity=sensitivity): count}, delta)

    return _least(cost, f"{count} scores", epsilon, delta)


def _least(cost: Callable[[float], float], subject: str, epsilon: float, delta: float) -> float:
    """Return the least noise, accurate to a thousandth, with which the releases cost at most ε. Raises MedsiloError if
    the least noise is above MOST_NOISE.
    """
    high = 1.0  # a sufficient noise level
    while cost(high) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise MedsiloError(_no_noise(subject, epsilon, delta))
    low = high / 2
    while low > 1e-2 and cost(low) <= epsilon:
        low, high = low / 2, low
    dear, cheap = low, high
    # to save steps of the bisection, estimate the sufficient noise, and check whether the bisection would reach the
    # estimate
    for _ in range(8):
        if not (epsilon < cost(dear) < math.inf and cost(cheap) > 0):
            break
        share = math.log(cost(dear) / epsilon) / math.log(cost(dear) / cost(cheap))
        below, above = _halved(low, high, (dear * (cheap / dear) ** share).__le__)
        if cost(above) > epsilon:
            dear = above
        elif cost(below) > epsilon:
            return above
        else:
            cheap = below
    return _halved(low, high, lambda noise: cost(noise) <= epsilon)[1]


def _halved(low: float, high: float, enough: Callable[[float], bool]) -> tuple[float, float]:
    """Return a noise level that is insufficient, and a sufficient noise level that is at most ROUGH times as large."""
    while high / low > ROUGH:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low, high


def _no_noise(subject: str, epsilon: float, delta: float) -> str:
    return f"no noise keeps {subject} within ε = {epsilon:g} at δ = {delta:g}: allow more ε, or release fewer results"


def counted(charges: Iterable[Charge]) -> Counter[Mechanism]:
    """Count the uses of each mechanism; releases of public data do not count."""
    found: Counter[Mechanism] = Counter()
    for charge in charges:
        of = charge.of
        if isinstance(of, SampledGaussian):
            found[of.model_copy(update={"steps": 1})] += of.steps
        elif not isinstance(of, Public):
            found[of.model_copy(update={"count": 1})] += of.count
    return found


def together(charges: Iterable[Charge], purpose: str) -> list[Charge]:
    """Return one charge for each mechanism, leaving out releases of public data."""
    found = []
    for of, times in counted(charges).items():
        key = "steps" if isinstance(of, SampledGaussian) else "count"
        found.append(Charge(what=purpose, of=of.model_copy(update={key: min(times, MOST_COUNT)})))
    return found


def _parts(used: Mapping[Mechanism, int]) -> Parts:
    """All Gaussian mechanisms without sampling together become one entry, because their values (1 / noise)² add up."""
    found: Counter[Part] = Counter()
    squares: list[float] = []
    for of, times in used.items():
        if isinstance(of, Gaussian):
            squares.append(times / of.noise**2)
        elif isinstance(of, SampledGaussian) and of.rate == 1:
            squares.append(times * (1 / of.noise) ** 2)
        elif isinstance(of, SampledGaussian):
            found["sampled", of.noise, of.rate, 1] += times
        elif isinstance(of, Geometric):
            found["geometric", of.scale, 1.0, of.sensitivity] += times
    if squares:
        found["gaussian", 1 / math.sqrt(math.fsum(sorted(squares))), 1.0, 1] = 1
    return tuple(sorted(found.items()))


@lru_cache(4096)
def _epsilon(parts: Parts, delta: float) -> float:
    if not parts:
        return 0.0
    if len(parts) == 1 and parts[0][0][0] == "gaussian":
        from dp_accounting import get_epsilon_gaussian

        return float(get_epsilon_gaussian(parts[0][0][1], delta))
    return max(0.0, float(_composed(parts).get_epsilon_for_delta(delta)))


@lru_cache(16)
def _composed(parts: Parts) -> Any:
    step = _step(parts)
    return reduce(lambda one, other: one.compose(other), (_distribution(part, times, step) for part, times in parts))


def _step(parts: Parts) -> float:
    """Return a grid step so large that a grid of limited size contains all privacy losses."""
    width = math.fsum(_reach(part, times) for part, times in parts)
    finest = min((_spread(part) for part, _ in parts), default=1.0) * WITHIN
    step = max(min(width / POINTS, finest), width / MOST_POINTS, FINEST)
    return 2.0 ** math.floor(math.log2(step))


def _spread(part: Part) -> float:
    """Return the approximate standard deviation of the privacy loss of one use of a mechanism."""
    kind, noise, rate, _ = part
    if kind == "geometric":
        return 1 / noise
    return rate * math.sqrt(math.expm1(min((1 / noise) ** 2, 1.0)))


def _reach(part: Part, times: int) -> float:
    kind, noise, rate, _ = part
    if kind == "geometric":
        return times / noise
    square = (1 / noise) ** 2
    drift = times * min(rate * square / 2, rate**2 * math.expm1(min(square, 700.0)))
    one = square / 2 + TAIL * math.sqrt(square)
    return min(drift + TAIL * math.sqrt(times * rate * square), times * one) + one


@lru_cache(64)
def _distribution(part: Part, times: int, step: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as losses

    kind, noise, rate, sensitivity = part
    given: dict[str, Any] = {"value_discretization_interval": step}
    if kind == "geometric":
        once = losses.from_discrete_laplace_mechanism(1 / (noise * sensitivity), sensitivity, **given)
    else:
        once = losses.from_gaussian_mechanism(noise, sampling_prob=rate, **given)
    return once.self_compose(times) if times > 1 else once
