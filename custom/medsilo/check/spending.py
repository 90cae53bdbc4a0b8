"""The content of a hospital's ledger, for `medsilo ledger` and the hospital's page."""

import math
from collections.abc import Mapping
from typing import Any

from medsilo.core.text import epsilon_text
from medsilo.privacy.accounting import epsilon_of
from medsilo.site.ledger import Ledger, LedgerStanding
from medsilo.site.settings import PrivacyRequirements

DELTA = 1e-5  # where neither the hospital nor its ledger names one


def spent(ledger: Ledger, demands: PrivacyRequirements | None) -> dict[str, Any]:
    """Return what a ledger says, as programs read it; an ε is None where no bound holds. Raises MedsiloError where it
    was changed."""
    standing = ledger.standing()
    named = [entry.delta for entry in standing.entries if entry.delta is not None]
    delta = demands.delta if demands else named[-1] if named else DELTA
    return {
        "data": ledger.data,
        "lines": len(standing.entries),
        "head": standing.head,
        "delta": delta,
        "epsilon": _known(standing.epsilon(delta)),  # of all studies together
        "allowed": demands.epsilon if demands else None,
        "studies": [_of_study(standing, study, delta) for study in standing.studies()],
    }


def _of_study(standing: LedgerStanding, study: str, delta: float) -> dict[str, Any]:
    """Return the cost of one study by itself."""
    entries = [entry for entry in standing.entries if entry.spending and entry.spending.study == study]
    spending = entries[-1].spending
    assert spending
    answers, cost = sum(entry.kind == "charged" for entry in entries), _known(epsilon_of(standing.of(study), delta))
    return {**spending.model_dump(), "answers": answers, "epsilon": cost}


def _known(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def spending_lines(found: Mapping[str, Any]) -> list[str]:
    """Return what a ledger says, in lines."""
    spending, allowed = found["epsilon"], ""
    if found["allowed"] is not None:
        left = None if spending is None else max(0.0, found["allowed"] - spending)
        allowed = f" of {found['allowed']:g} allowed, about {epsilon_text(left)} left"
    lines = [
        f"data set {found['data']}: ε = {epsilon_text(spending)} at δ = {found['delta']:g}{allowed}",
        f"  {found['lines']} lines, the last one {found['head'][:16]}",
    ]
    for one in found["studies"]:
        lead = f", submitted by {one['lead']}" if one["lead"] else ""
        cost = f"answers: {one['answers']}, ε = {epsilon_text(one['epsilon'])} by itself"
        lines.append(f"  {one['study']}: {one['method']}{lead}, {cost}")
    return lines
