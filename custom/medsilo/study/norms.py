"""Rows whose networks differ in their norm: they are held against rows of the same norm, or it is said."""

from collections.abc import Mapping, Sequence

from medsilo.plan import Plan
from medsilo.study.cells import Row

ALONE, POOLED = "local", "central"  # what no federation makes; others are held against it


def kind_of(plan: Plan) -> tuple[str, str]:
    """Return the network's name and its norm."""
    return plan.network.name, str(getattr(plan.network, "norm", "none"))


def unlike(one: Plan, other: Plan) -> str | None:
    """Return in words how the network of one plan differs from that of another; None if it does not."""
    (mine, norm), (theirs, their_norm) = kind_of(one), kind_of(other)
    if mine != theirs:
        return f"network {mine} against {theirs}"
    return None if norm == their_norm else f"norm {norm} against {their_norm}"


def with_local_pairs(rows: Sequence[Row], plans: Mapping[Row, Plan]) -> list[Row]:
    """Return the rows, and for each federation whose norm no local row has, a local row with that norm."""
    found = list(rows)
    kinds = {row: kind_of(plan) for row, plan in plans.items()}
    for row in rows:
        if row.method in (ALONE, POOLED):
            continue
        own = [other for other in found if other.method == ALONE]
        if not own or any(kinds[other] == kinds[row] for other in own):
            continue
        network, norm = kinds[row]
        more = () if network == kinds[own[0]][0] else (f"network.name={network}",)
        if hasattr(plans[row].network, "norm"):
            more = (*more, f"network.norm={norm}")
        named = norm if len(more) == 1 else f"{network} {norm}"
        pair = Row(f"{own[0].title} ({named})", (*own[0].changes, *more))
        kinds[pair] = kinds[row]
        found.append(pair)
    return found
