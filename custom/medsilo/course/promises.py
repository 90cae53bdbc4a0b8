"""What sealing protects against, and against whom it does not: one text for docs, reports and records."""

from typing import Any, Literal

Sealing = Literal["none", "group", "pairwise"]

SEALING: dict[Sealing, str] = {
    "none": "Sealing none: the server, and whoever reads its disk, sees every tensor that leaves a hospital.",
    "group": "Sealing group: the server sees noise in place of what hospitals send and of the mixture, as long as no "
    "hospital gives it the hospitals' common key: one that does opens everything, and any hospital can read the "
    "mixtures that all are given.",
    "pairwise": "Sealing pairwise: the server, together with fewer hospitals than the threshold, learns sums over "
    "hospitals and nothing of a single one; all hospitals but one, put together, can work out that one from a sum, "
    "and what the server may read of a sum (the mean that it needs) is open to it.",
}
OPEN = (
    "Sealed or not, the server knows the numbers of cases, scores and losses, who answered when, and whole numbers "
    "among the tensors such as batch norm's counters of batches."
)


def sealing_facts(sealing: Sealing, keys: str) -> dict[str, Any]:
    """Return what a record says of a study that seals; keys: what they rest on."""
    return {"mode": sealing, "keys": keys, "protects": [SEALING[sealing], OPEN]}
