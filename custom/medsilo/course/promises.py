"""The promises of sealing, and against whom it does not protect: one text for docs, reports and records."""

from collections.abc import Sequence
from typing import Literal

Sealing = Literal["none", "pairwise"]

SEALING: dict[Sealing, str] = {
    "none": "Sealing none: the server, and whoever reads its disk, sees every tensor that leaves a hospital.",
    "pairwise": "Sealing pairwise: the server learns sums over hospitals and nothing of a single one, as long as fewer "
    "hospitals than the threshold help it, and fewer than twice the threshold less the number of hospitals if it lies; "
    "all hospitals but one, put together, can work out that one from a sum, half of them the others from AdaFed's "
    "mixtures, and what the server may read of a sum (the mean that it needs) is open to it.",
}
OPEN = (
    "Sealed or not, the server knows the numbers of cases, scores and losses, who answered when, and whole numbers "
    "among the tensors such as batch norm's counters of batches."
)
COUNTED = (
    "Sealed or not, the server knows the numbers of validation and test cases, scores and losses, and who answered "
    "when; the numbers of training cases are sealed, too, and of them it learns their sum at most."
)
ALL_SEALED = "No group of tensors that can be sealed leaves in clear."


def promises(sealing: Sealing, clear: Sequence[str], counts: bool) -> list[str]:
    """Return what is said of a study, the same wherever it is said.

    clear: the groups that leave in clear, as the plan says. counts: whether numbers of cases are sealed, too.
    """
    if sealing == "none":
        return [SEALING[sealing]]
    rest = f"In clear, as the plan says (transport.sealing_clear): {', '.join(clear)}." if clear else ALL_SEALED
    return [SEALING[sealing], COUNTED if counts else OPEN, rest]
