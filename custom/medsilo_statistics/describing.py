"""Descriptions of patients by sums: moments, quantiles, differences between groups, survival curves and their test."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from medsilo_statistics.asked_question import Variable
from medsilo_statistics.patients import Floats

NORMAL = 1.959963984540054


def moments(variable: Variable, row: Floats, noise: float = 0.0) -> tuple[float, float, float, float, float]:
    """Return number, mean, standard deviation and the mean's 95 % interval of a row of sums; NaN where there are none.

    noise: variance of each sum, which the interval includes.
    """
    from scipy.special import stdtrit

    count, total, square = (float(own) for own in row)
    if not count > 1:
        alone = variable.middle + variable.half * total / count if count > 0.5 else np.nan
        return count, alone, np.nan, np.nan, np.nan
    mean = total / count
    spread = max(square - count * mean**2, 0.0) / (count - 1)
    error = np.sqrt(spread / count + noise * (1 + mean**2) / count**2)
    own, half = variable.middle + variable.half * mean, variable.half * stdtrit(count - 1, 0.975) * error
    return count, own, variable.half * float(np.sqrt(spread)), float(own - half), float(own + half)


def quantile(variable: Variable, counts: Floats, share: float) -> float | None:
    """Return a quantile of a histogram; values were counted at the nearest place, so it is off by half a step."""
    total = float(counts.sum())
    if not total > 0:
        return None
    assert variable.range
    place = int(np.searchsorted(np.cumsum(counts), share * total - 1e-9))
    return float(variable.range[0] + min(place, len(counts) - 1) * variable.width)


def difference_of_shares(one: Floats, other: Floats) -> float:
    """Return the standardised difference of categories (Yang and Dalton 2012). one, other: counts by level."""
    if not (one.sum() > 0 and other.sum() > 0):
        return np.nan
    p, q = (own[1:] / own.sum() for own in (one, other))
    spread = (np.diag(p) - np.outer(p, p) + np.diag(q) - np.outer(q, q)) / 2
    apart = p - q
    over = np.linalg.pinv(spread, hermitian=True) @ apart
    # Where neither group varies in what sets them apart, the difference has no scale.
    return float(np.sqrt(max(apart @ over, 0.0))) if np.allclose(spread @ over, apart, atol=1e-9) else np.nan


def survival_curve(counts: Floats, noise: float = 0.0) -> tuple[NDArray[np.int64], Floats, Floats, Floats, Floats]:
    """Return a curve by Kaplan and Meier of events and ends of observation, by place of the grid: the places at which
    there are events, the share there and its band's ends (by Greenwood on log(-log)), and who is at risk at all places.

    noise: variance of each count. The curve then ends where fewer are at risk than four deviations of that number.
    """
    events = counts[:, 0]
    risk = np.cumsum(counts.sum(1)[::-1])[::-1]
    later = np.arange(2.0 * len(risk), 0.0, -2.0)  # counts that those at risk are the sum of
    seen = np.cumprod(risk > 4 * np.sqrt(noise * later)) > 0
    shown = np.flatnonzero(seen if noise else events > 0)
    d, n = events[shown], risk[shown]
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Floats = np.cumprod(1 - d / n, dtype=np.float64)
        each = d / (n * (n - d))
        square = np.cumsum(each)
        if noise:
            share = np.minimum.accumulate(np.clip(share, 1e-9, 1 - 1e-9))
            square = np.maximum(square, 0) + noise * _moved(square, np.float64(1) / (n - d), later[shown])
        spread = np.sqrt(square) / np.log(share)
        low, high = (share ** np.exp(sign * NORMAL * spread) for sign in (-1, 1))
    ended = share <= 0
    low[ended] = high[ended] = 0.0
    return shown, share, low, high, risk


def _moved(gained: Floats, happened: Floats, later: Floats) -> Floats:
    """Return the sum of squares of what each count changes in a curve's logarithm, at each time.

    A patient who is seen until a place is at risk at all before, which adds `gained` there; an event also happened.
    """
    until = np.cumsum(np.square(gained - happened) + np.square(gained))
    return until + (later - 2) * np.square(gained)


def log_rank(counts: Sequence[Floats]) -> tuple[float, float]:
    """Return the log-rank test's statistic and p. counts: of each group, by place."""
    from scipy.special import chdtrc

    events = np.stack([own[:, 0] for own in counts])
    risk = np.stack([np.cumsum(own.sum(1)[::-1])[::-1] for own in counts])
    shown = events.sum(0) > 0
    d, n, own = events.sum(0)[shown], risk.sum(0)[shown], risk[:, shown]
    apart = (events.sum(1) - (own * d / n).sum(1))[:-1]
    factor = d * np.where(n > 1, (n - d) / np.maximum(n - 1, 1), 0.0)
    share = own / n
    spread = np.einsum("gt,ht,t->gh", share, -share, factor) + np.diag((share * factor).sum(1))
    free = len(counts) - 1
    found = float(apart @ np.linalg.pinv(spread[:-1, :-1], hermitian=True) @ apart) if free and shown.any() else 0.0
    return found, float(chdtrc(free, found)) if free else 1.0
