"""The content of a hospital's ledger, for `medsilo ledger` and the hospital's page."""

import math
from dataclasses import dataclass

from medsilo.privacy.accounting import epsilon_of
from medsilo.privacy.mechanisms import Demands
from medsilo.site.ledger import Ledger, LedgerStanding

DELTA = 1e-5  # where neither the hospital nor its ledger names one


@dataclass(frozen=True)
class StudyCost:
    """The cost of one study."""

    study: str
    plan: str
    method: str
    lead: str
    answers: int
    epsilon: float | None  # by itself; None: no bound holds


@dataclass(frozen=True)
class LedgerCost:
    """The content of one data set's ledger."""

    data: str
    lines: int
    head: str
    delta: float
    epsilon: float | None  # of all studies together
    allowed: float | None
    studies: tuple[StudyCost, ...]

    @property
    def left(self) -> float | None:
        """Return how far the total is from what is allowed."""
        return None if self.epsilon is None or self.allowed is None else max(0.0, self.allowed - self.epsilon)


def spent(ledger: Ledger, demands: Demands | None) -> LedgerCost:
    """Return what a ledger says; raises MedsiloError where it was changed."""
    standing = ledger.standing()
    named = [entry.delta for entry in standing.entries if entry.delta is not None]
    delta = demands.delta if demands else named[-1] if named else DELTA
    return LedgerCost(
        ledger.data,
        len(standing.entries),
        standing.head,
        delta,
        _known(standing.epsilon(delta)),
        demands.epsilon if demands else None,
        tuple(_of_study(standing, study, delta) for study in standing.studies()),
    )


def _of_study(standing: LedgerStanding, study: str, delta: float) -> StudyCost:
    entries = [entry for entry in standing.entries if entry.spending and entry.spending.study == study]
    spending = entries[-1].spending
    assert spending
    answers = sum(entry.kind == "charged" for entry in entries)
    cost = _known(epsilon_of(standing.of(study), delta))
    return StudyCost(study, spending.plan, spending.method, spending.lead, answers, cost)


def _known(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def in_words(epsilon: float | None) -> str:
    """Return an ε as people read it."""
    return f"{epsilon:.3f}" if epsilon is not None and math.isfinite(epsilon) else "no bound"


def spending_lines(found: LedgerCost) -> list[str]:
    """Return what a ledger says, in lines."""
    allowed = "" if found.allowed is None else f" of {found.allowed:g} allowed, about {in_words(found.left)} left"
    lines = [
        f"data set {found.data}: ε = {in_words(found.epsilon)} at δ = {found.delta:g}{allowed}",
        f"  {found.lines} lines, the last one {found.head[:16]}",
    ]
    for one in found.studies:
        lead = f", submitted by {one.lead}" if one.lead else ""
        lines.append(
            f"  {one.study}: {one.method}{lead}, answers: {one.answers}, ε = {in_words(one.epsilon)} by itself"
        )
    return lines
