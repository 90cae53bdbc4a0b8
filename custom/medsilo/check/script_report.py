"""Report the messages of a training script, and the maximum number of bits that each kind of number could carry."""

from collections.abc import Iterator
from typing import Any

from medsilo.check.result import aligned
from medsilo.core.text import counted, size_text
from medsilo.federation.script_bits import KINDS, MOST_LOGGED, Stretch, in_all, logged_names, most_bits
from medsilo.plan import Plan

IMAGE = 512 * 512 * 16  # bits of an image slice with 512 × 512 pixels of 16 bits each
OUTSIDE = (
    "These are medsilo's own messages, and in a hospital's airlock nothing else leaves but the moments of the answers. "
    "Without it the code has the rights of the account that runs the kit, so it could also send by a connection of its "
    "own; no number bounds that. Read the code."
)


def most_that_leaves(plan: Plan) -> dict[str, Any]:
    """Return the number of messages of a site with a training script in a study, and the maximum bits of each kind of
    number.
    """
    stretches = most_bits(plan)
    return {
        "messages": sum(stretch.times for stretch in stretches),
        "round": dict(_largest(stretches)),
        "study": {kind: in_all(stretches)[kind] for kind in KINDS},
    }


def _largest(stretches: list[Stretch]) -> Iterator[tuple[str, int]]:
    for kind in KINDS:
        yield kind, max(stretch.bits[kind] for stretch in stretches if stretch.task == "round")


def script_lines(plan: Plan) -> list[str]:
    found = most_that_leaves(plan)
    names = ", ".join(sorted(logged_names(plan)))
    what = {
        "tensors": "weights, and what else the method sends",
        "metrics": f"{plan.task.goal.metric.lstrip('-')}, and losses, as the script works them out",
        "counts": "numbers of cases, as the script states them",
        "logged numbers": f"at most {MOST_LOGGED:,} a round, named {names}",
        "times": "seconds and memory",
        "warnings": "kinds of medsilo's own with numbers",
    }
    rows: list[tuple[str | int, ...]] = [("kind", "bits a round", "bits in the study", "what")]
    rows += [(kind, found["round"][kind], found["study"][kind], what[kind]) for kind in KINDS]
    rows.append(("all", sum(found["round"].values()), sum(found["study"].values()), ""))
    tensors = found["round"]["tensors"]
    numbers = max((own.parameters for own in most_bits(plan)), default=0)
    images = tensors / IMAGE
    return [
        f"What this script could send, at most: {counted(found['messages'], 'message')}, one in each of "
        f"{counted(plan.rounds, 'round')}, one on joining, one with the outcome, one with the test.",
        *aligned(rows),
        "A round that the server asks for again counts again; this hospital counts what leaves (medsilo ledger).",
        f"What no check can see: weights can encode anything. Those of one round are {numbers:,} numbers, together "
        f"{tensors:,} bits ({size_text(tensors / 8)}): room for {f'{images:,.0f}' if images >= 1 else 'a part of one'} "
        f"image{'s' if images >= 2 else ''} of 512 × 512 pixels with 16 bits each.",
        OUTSIDE,
    ]
