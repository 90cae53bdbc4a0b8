"""A site's account of privacy in one study: let in by its ledger, charged before an answer leaves.

The order at a site is: train; write the state and the answer, both with the attempt's name; enter the attempt in the
ledger; send. Until it is entered, nothing that was written is used: not the answer, and not the state, from which
later answers would follow. A process that dies anywhere leaves a ledger with as much as left, or with one answer more,
and that answer is sent, as it was, when the server asks for it again.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from medsilo.federation.kept_answer import KeptAnswers
from medsilo.privacy.agreed import Demands
from medsilo.privacy.mechanisms import Charge
from medsilo.runs.messages import Parcel
from medsilo.site.ledger import Ledger, Spending


class Account:
    """What one study costs one hospital."""

    def __init__(
        self,
        ledger: Ledger,
        spending: Spending,
        demands: Demands | None,
        folder: Path,
        runs: Callable[[str], bool] = lambda study: False,
    ) -> None:
        """folder: the site's, of the study; runs: whether another study runs, which keeps what it planned."""
        self.ledger, self.spending, self.demands, self.runs = ledger, spending, demands, runs
        self.kept = KeptAnswers(folder)
        self.attempt = ""

    def admit(self, planned: Sequence[Charge]) -> None:
        """Let the study in, or raise Refused, with what it would cost and what is left."""
        self.ledger.plan(self.spending, planned, self.demands, self.runs)

    def afford(self, planned: Sequence[Charge]) -> None:
        """Raise Refused where so much can't be charged; nothing is written."""
        self.ledger.afford(self.spending, planned, self.demands, self.runs)

    def begin(self) -> str:
        """Begin an attempt at an answer; return its name."""
        self.attempt = secrets.token_hex(16)
        return self.attempt

    def counts(self, attempt: str) -> bool:
        """Whether what an attempt wrote may be used: its ledger entry is there."""
        return self.ledger.standing().has(self.spending.study, attempt)

    def again(self, request: Parcel) -> Parcel | None:
        """Return the answer that this very request got already, where it was entered."""
        found = self.kept.find(request)
        return found[1] if found and self.counts(found[0]) else None

    def settle(self, request: Parcel, reply: Parcel, what: str, charges: Sequence[Charge]) -> None:
        """Write the answer, and enter it: when this returns, it may leave. Raises Refused when nothing is left."""
        self.kept.keep(request, self.attempt, reply)
        self.ledger.charge(self.spending, what, self.attempt, charges, self.demands, self.runs)
