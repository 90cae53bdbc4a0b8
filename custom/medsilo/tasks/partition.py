"""Deal a pool of samples to sites so that their labels differ."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from medsilo.core.errors import DataError, PlanError
from medsilo.core.section import Section
from medsilo.learning.seeds import seed_for

DRAWS = 20


class Partition(Section):
    """The dealing of one folder to simulated sites. A patient's cases go to one site, whole.

    iid: at random, as evenly as can be. dirichlet: by the patients' classes, in shares drawn from Dirichlet(alpha).
    column: the table's `site` column says whose a case is.
    """

    kind: Literal["iid", "dirichlet", "column"] = Field(
        "iid",
        description="at random, by class in shares drawn from a Dirichlet distribution, or by the table's `site` "
        "column",
    )
    alpha: float = Field(0.5, gt=0, description="of the Dirichlet distribution: the smaller, the more the sites differ")
    minimum: int = Field(3, ge=1, description="patients that every site gets at least")
    seed: int = Field(0, ge=0, lt=2**32, description="another number deals the patients in another way")

    def deal(
        self, patients: Sequence[str], classes: Sequence[int], natural: Sequence[str], sites: Sequence[str]
    ) -> list[np.ndarray]:
        """The cases of every site, [sites] sorted arrays. For each case: its patient, class and natural site."""
        if self.kind == "column":
            return by_column(natural, sites)
        names, owner = np.unique(np.asarray(patients), return_inverse=True)
        if self.kind == "iid":
            dealt = iid(len(names), len(sites), self.seed, self.minimum)
        else:
            table = np.zeros((len(names), max(classes, default=0) + 1), np.int64)
            np.add.at(table, (owner, np.asarray(classes, np.int64)), 1)
            dealt = dirichlet(table.argmax(1), len(sites), self.alpha, self.seed, self.minimum)
        return [np.flatnonzero(np.isin(owner, chosen)) for chosen in dealt]


def iid(samples: int, sites: int, seed: int, minimum: int = 1) -> list[np.ndarray]:
    """Deals samples to sites at random; sizes differ by at most one. One sorted array of indices per site."""
    check(samples, sites, 1.0, minimum)
    order = np.random.default_rng(seed_for(seed, "iid")).permutation(samples)
    return [np.sort(order[site::sites]) for site in range(sites)]


def by_column(natural: Sequence[str], sites: Sequence[str]) -> list[np.ndarray]:
    """The samples that a column gives to each site; every site has some. Those of no site are left out."""
    column = np.asarray(natural, dtype=object)
    dealt = [np.flatnonzero(column == site) for site in sites]
    without = [site for site, chosen in zip(sites, dealt, strict=True) if not len(chosen)]
    if without:
        raise DataError(f"the table's site column gives no case to {', '.join(without)}; name sites as it does")
    return dealt


def dirichlet(labels: ArrayLike, sites: int, alpha: float, seed: int, minimum: int = 1) -> list[np.ndarray]:
    """Deals samples to sites, class by class in proportions drawn from Dirichlet(alpha), as Yurochkin et al. (2019).

    labels: [n] integers (array, tensor or list). Returns one sorted array of indices per site; together they hold
    every index exactly once, and each holds at least `minimum`. A draw that leaves a site with less is repeated; if
    all draws do, the best one is kept and samples chosen at random move from the largest sites to the small ones.
    The smaller alpha, the fewer classes a site has and the more the sizes of the sites differ.
    """
    classes = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    check(len(classes), sites, alpha, minimum)
    random = np.random.default_rng(seed_for(seed, "dirichlet"))
    best, least = np.zeros(0, np.int64), math.inf
    for _ in range(DRAWS):
        owners = draw(classes, sites, alpha, random)
        missing = np.maximum(minimum - np.bincount(owners, minlength=sites), 0).sum()
        if missing < least:
            best, least = owners, missing
        if least == 0:
            break
    fill_up(best, sites, minimum, random)
    return [np.flatnonzero(best == site) for site in range(sites)]


def check(samples: int, sites: int, alpha: float, minimum: int) -> None:
    """Raises PlanError when no partition can keep the promises."""
    if sites < 1:
        raise PlanError(f"sites: {sites} sites cannot share samples; name at least one")
    if not (math.isfinite(alpha) and alpha > 0):
        raise PlanError(f"alpha: {alpha} is not a positive number; take 0.1 for strong label shift, 100 for hardly any")
    if minimum < 0:
        raise PlanError(f"minimum: {minimum} samples per site is less than none; take 0 or more")
    if sites * minimum > samples:
        raise PlanError(
            f"minimum: {sites} sites with at least {minimum} samples each need {sites * minimum}, but there are "
            f"{samples}; take fewer sites, a smaller minimum or more samples"
        )


def draw(classes: np.ndarray, sites: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    """The site of every sample, [n]: one draw of proportions per class."""
    owners = np.zeros(len(classes), np.int64)
    for label in range(classes.max(initial=-1) + 1):
        members = random.permutation(np.flatnonzero(classes == label))
        ends = np.floor(np.cumsum(proportions(sites, alpha, random)) * len(members))
        # The last site takes what rounding leaves, so its end is not asked for.
        owners[members] = np.searchsorted(ends[:-1], np.arange(len(members)), side="right")
    return owners


def proportions(sites: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    """One draw from the symmetric Dirichlet distribution, [sites]."""
    shares = random.dirichlet(np.full(sites, alpha))
    if np.isfinite(shares).all() and math.isclose(shares.sum(), 1, rel_tol=1e-6):
        return shares
    # For an extremely small or large alpha the draw under- or overflows: its limits are one site or equal shares.
    return np.eye(sites)[random.integers(sites)] if alpha < 1 else np.full(sites, 1 / sites)


def fill_up(owners: np.ndarray, sites: int, minimum: int, random: np.random.Generator) -> None:
    """Moves samples, in place, from the largest sites until every site has its minimum."""
    sizes = np.bincount(owners, minlength=sites)
    while sizes.min() < minimum:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        count = min(minimum - sizes[poor], sizes[rich] - minimum)
        owners[random.choice(np.flatnonzero(owners == rich), count, replace=False)] = poor
        sizes[poor] += count
        sizes[rich] -= count
