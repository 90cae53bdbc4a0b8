"""Summarise a hospital's privacy ledger for `medsilo ledger` and the hospital's page."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from medsilo.core.text import counted, epsilon_text
from medsilo.privacy.accounting import epsilon_of
from medsilo.site.ledger import Ledger, LedgerStanding
from medsilo.site.query_budget import MESSAGES, QueryBudget
from medsilo.site.settings import PrivacyRequirements

DELTA = 1e-5  # the δ if neither the hospital nor its ledger specifies one


def spent(ledger: Ledger, demands: PrivacyRequirements | None) -> dict[str, Any]:
    """Summarise a ledger as JSON values, and raise a MedsiloError if the ledger was changed.

    ε is None if no privacy bound is known.
    """
    standing = ledger.standing()
    named = [entry.delta for entry in standing.entries if entry.delta is not None]
    delta = demands.delta if demands else named[-1] if named else DELTA
    return {
        "data": ledger.data,
        "lines": len(standing.entries),
        "head": standing.head,
        "delta": delta,
        "epsilon": _known(standing.epsilon(delta)),  # the privacy cost ε of all studies together
        "allowed": demands.epsilon if demands else None,
        "studies": [_of_study(standing, study, delta) for study in standing.studies()],
    }


def _of_study(standing: LedgerStanding, study: str, delta: float) -> dict[str, Any]:
    entries = [entry for entry in standing.entries if entry.spending and entry.spending.study == study]
    spending = entries[-1].spending
    assert spending
    answers, cost = sum(entry.kind == "charged" for entry in entries), _known(epsilon_of(standing.of(study), delta))
    found = {**spending.model_dump(), "answers": answers, "epsilon": cost}
    if sent := [entry for entry in entries if entry.kind == "sent"]:
        bits: Counter[str] = Counter()
        for entry in sent:
            bits.update(entry.bits)
        noisy = [entry.update_rho for entry in sent if entry.update_rho is not None]
        found["script"] = {"messages": len(sent), "bits": dict(bits), "update_rho": sum(noisy) if noisy else None}
    return found


def answered(budget: QueryBudget) -> list[dict[str, Any]]:
    """For each study, return the number of answers that left the hospital, and for a training script also the maximum
    bits of its messages.
    """
    return [
        {**vars(requester), "answers": dict(count.answered), **({"script": dict(count.sent)} if count.sent else {})}
        for requester, count in budget.counts().items()
        if count.answered or count.sent
    ]


def answer_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for entry in entries:
        lead = f", submitted by {entry['lead']}" if entry["lead"] else ""
        scores = ", ".join(f"{number} over {part} cases" for part, number in entry["answers"].items() if number)
        lines.append(f"data set {entry['data']}, study {entry['study']}{lead}: answers with scores: {scores or 'none'}")
        if sent := dict(entry.get("script", {})):
            messages = sent.pop(MESSAGES, 0)
            lines.append(f"  its script sent {counted(messages, 'message')}; bits: {_bits(sent)}")
    return lines


def _bits(sent: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {bits:,}" for kind, bits in sent.items() if bits)


def _known(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def spending_lines(found: Mapping[str, Any]) -> list[str]:
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
        cost = "a training script, of which no ε is known" if one.get("script") else cost
        lines.append(f"  {one['study']}: {one['method']}{lead}, {cost}")
        if script := one.get("script"):
            noise = script["update_rho"]
            told = "" if noise is None else f"; noise on its updates, as wholes: ρ = {noise:.3g}"
            lines.append(f"    {counted(script['messages'], 'message')}, bits: {_bits(script['bits'])}{told}")
    return lines
