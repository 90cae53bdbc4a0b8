"""The ledger's layer: a site's account of privacy in one study, charged before an answer leaves.

The order at a site is: train; write the state and the answer, both with the attempt's name; enter the attempt in the
ledger; send. Until it is entered, nothing that was written is used: not the answer, and not the state, from which
later answers would follow. A process that dies anywhere leaves a ledger with as much as left, or with one answer more,
and that answer is sent, as it was, when the server asks for it again.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from medsilo.core.errors import Refused
from medsilo.core.files import write_json
from medsilo.federation.kept_answer import KeptAnswers
from medsilo.federation.participant import Participant
from medsilo.federation.private_numbers import refuse_bare_counts
from medsilo.federation.protection import Protection
from medsilo.federation.sealed.identity import signer_of
from medsilo.federation.seams import Place, Site
from medsilo.learning.loop import Stop
from medsilo.privacy.accounting import counted, epsilon_of, noise_for
from medsilo.privacy.agreed import stricter
from medsilo.privacy.mechanisms import Charge, Gaussian
from medsilo.runs.messages import Parcel, Request
from medsilo.runs.paths import SPENT
from medsilo.runs.schema import Spent
from medsilo.sealing.signing import Certified
from medsilo.site.ledger import WHOLE, CountedStudy, Ledger, Spending
from medsilo.site.settings import FILE_NAME

Pricing = Callable[[str, int], Sequence[Charge]]  # what an answer to a task, in a round, costs


class PrivacyAccount:
    """The account of one study at one hospital."""

    def __init__(self, ledger: Ledger, study: CountedStudy, folder: Path) -> None:
        """folder: the site's, of the study."""
        self.ledger, self.study = ledger, study
        self.folder, self.kept = folder, KeptAnswers(folder)
        self.attempt = ""

    @classmethod
    def of(cls, place: Place) -> Self | None:
        """Return the account of a study that is counted: where the hospital demands privacy, and where a plan promises
        it to patients. Raises Refused, before data are read, where the promise can't be kept or is not left."""
        plan, folder, demands = place.plan, place.folder, place.settings.privacy
        protection = Protection(plan, place.site, place.settings, folder, place.lead)
        if demands is None and (plan.privacy is None or not protection.on):
            return None
        if plan.privacy is None:
            raise Refused(
                f"this hospital demands differential privacy (privacy in its {FILE_NAME}), and the plan promises none; "
                "add a section privacy with epsilon and delta"
            )
        refuse_bare_counts(plan, demands)
        signer, asker = signer_of(place.kit), protection.asker
        ledger = Ledger(protection.book.folder, asker.data, signer.key if isinstance(signer, Certified) else None)
        spending = Spending(study=asker.study, plan=plan.hash, method=plan.algorithm.title, lead=asker.lead)
        account = cls(ledger, CountedStudy(spending, demands, protection.book.runs), folder)
        promise = stricter(plan.privacy, demands)
        about = Gaussian(noise=noise_for(promise.epsilon, promise.delta, 1.0, 1))
        ledger.expect(account.study, [Charge(what=WHOLE, of=about)])
        return account

    def enter(self, what: str, attempt: str, charges: Sequence[Charge]) -> None:
        """Enter what was drawn once and is part of every answer, unless it is there."""
        self.ledger.charge(self.study, what, attempt, charges)

    def admit(self, planned: Sequence[Charge]) -> None:
        """Let the study in, or raise Refused, with what it would cost and what is left."""
        self.ledger.plan(self.study, planned)

    def afford(self, planned: Sequence[Charge]) -> None:
        """Raise Refused where so much can't be charged; nothing is written."""
        self.ledger.afford(self.study, planned)

    def begin(self) -> str:
        """Begin an attempt at an answer; return its name."""
        self.attempt = secrets.token_hex(16)
        return self.attempt

    def counts(self, attempt: str) -> bool:
        """Return whether what an attempt wrote may be used: its ledger entry is there."""
        return self.ledger.standing().has(self.study.name, attempt)

    def again(self, request: Parcel) -> Parcel | None:
        """Return the answer that this very request got already, where it was entered."""
        found = self.kept.find(request)
        return found[1] if found and self.counts(found[0]) else None

    def settle(self, request: Parcel, reply: Parcel, what: str, charges: Sequence[Charge]) -> None:
        """Write the answer, and enter it: when this returns, it may leave. Raises Refused when nothing is left."""
        self.kept.keep(request, self.attempt, reply)
        self._tell_hospital(charges)
        # The last thing before sending: a death in between counts an answer that did not leave.
        self.ledger.charge(self.study, what, self.attempt, charges)

    def _tell_hospital(self, charges: Sequence[Charge]) -> None:
        """Write how much is spent, these charges included, beside the site's results, for its own report.

        It never leaves the site.
        """
        standing, added = self.ledger.standing(), counted(charges)
        delta = self.study.demands.delta if self.study.demands else 1e-5
        study, spent = standing.of(self.study.name) + added, standing.charged + added
        said = Spent(
            study=_finite(epsilon_of(study, delta)),
            all_studies=_finite(epsilon_of(spent, delta)),
            delta=delta,
            allowed=self.study.demands.epsilon if self.study.demands else None,
            entries=1 + sum(entry.spending == self.study.spending for entry in standing.entries),
        )
        write_json(self.folder / SPENT, said.as_json())


class Accounting:
    """A site whose answers are charged: each leaves once, and again as it was when it is asked for again.

    Two things cross the layers between it and the participant: what an answer costs, and the attempt's name, under
    which the site's state is kept and without which it is not used.
    """

    def __init__(self, inner: Site, account: PrivacyAccount, participant: Participant, beside: Pricing) -> None:
        """beside: what layers in between charge for an answer."""
        self.inner, self.account, self.participant, self.beside = inner, account, participant, beside
        rounds = range(1, participant.plan.rounds + 1)
        extra = [
            charge
            for task, number in [("join", 0), *(("round", number) for number in rounds), ("deliver", 0), ("test", 0)]
            for charge in beside(task, number)
        ]
        account.admit([*participant.planned_charges(), *extra])
        participant.state.counts = account.counts

    def answer(self, parcel: Parcel, stop: Stop) -> Parcel:
        if reply := self.account.again(parcel):
            return reply
        asked, state = Request.read(parcel.facts), self.participant.state
        charges = [*self.participant.charges(asked.task, asked.round), *self.beside(asked.task, asked.round)]
        self.account.afford(charges)
        state.attempt = self.account.begin()
        reply = self.inner.answer(parcel, stop)
        numbers = self.participant.numbers
        if numbers and numbers.counted:
            self.account.enter("numbers of cases", numbers.counted[0], numbers.count_charges)
        done, state.done = state.done, -1  # unless it is charged, it does not leave, and its state is void
        what = f"{asked.task} {asked.round}" if asked.task == "round" else asked.task
        self.account.settle(parcel, reply, what, charges)
        state.done = done
        return reply


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
