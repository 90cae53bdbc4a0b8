"""The ledger's layer: a site's account of privacy in one study, charged before an answer leaves.

The order at a site is: train; write the state and the answer, both with the attempt's name; enter the attempt in the
ledger; send. Until it is entered, nothing that was written is used: not the answer, and not the state, from which
later answers would follow. A process that dies anywhere leaves a ledger with as much as left, or with one answer more,
and that answer is sent, as it was, when the server asks for it again.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from medsilo.core.errors import Refused, reading
from medsilo.core.files import load_tensors, save_tensors, write_json
from medsilo.core.tensors import Groups
from medsilo.federation.disclosure import finite
from medsilo.federation.participant import Participant
from medsilo.federation.private_site import COUNTS_REFUSED, PrivateNumbers, agreed, how_told
from medsilo.federation.protection import Protection
from medsilo.federation.site_context import Site, SiteContext
from medsilo.learning.compute import Stop
from medsilo.privacy.accounting import counted, epsilon_of, noise_for
from medsilo.privacy.mechanisms import Charge
from medsilo.runs.messages import BETWEEN, Request, StudyMessage, digest_of, flat
from medsilo.runs.own_files import Spent
from medsilo.runs.paths import ANSWER_FILES, SPENT
from medsilo.site.ledger import WHOLE, CountedStudy, Ledger, Spending, ledger_of


class PrivacyAccount:
    """The account of one study at one hospital."""

    def __init__(self, ledger: Ledger, study: CountedStudy, folder: Path) -> None:
        """folder: the site's, of the study."""
        self.ledger, self.study, self.folder, self.attempt = ledger, study, folder, ""

    @classmethod
    def of(cls, place: SiteContext) -> Self | None:
        """Return the account of a study that is counted: where the hospital demands privacy, and where a plan promises
        it to patients. Raises Refused, before data are read, where the promise can't be kept or is not left."""
        plan, folder, demands = place.plan, place.folder, place.settings.privacy
        protection, promise = Protection(place), agreed(plan, demands)
        if promise is None or (demands is None and not protection.on):
            return None
        if how_told(plan, demands, "counts", True) == "silent":
            raise Refused(COUNTS_REFUSED)
        asker = protection.asker
        ledger = ledger_of(protection.book, asker.data, place.kit)
        spending = Spending(study=asker.study, plan=plan.hash, method=plan.algorithm.title, lead=asker.lead)
        account = cls(ledger, CountedStudy(spending, demands, protection.book.runs), folder)
        about = Charge.normal(WHOLE, noise_for(promise.epsilon, promise.delta, 1.0, 1))
        ledger.expect(account.study, [about])
        return account

    def begin(self) -> str:
        """Begin an attempt at an answer; return its name."""
        self.attempt = secrets.token_hex(16)
        return self.attempt

    def counts(self, attempt: str) -> bool:
        """Return whether what an attempt wrote may be used: its ledger entry is there."""
        return self.ledger.standing().has(self.study.name, attempt)

    def again(self, request: StudyMessage) -> StudyMessage | None:
        """Return the answer that this very request got already, where it was entered."""
        path = self._path(request)
        if not path.exists():
            return None
        with reading("this site's last answer"):
            tensors, facts = load_tensors(path)
            if facts["request"] != digest_of(request) or not self.counts(facts["attempt"]):
                return None
            groups: Groups = {group: {} for group in facts["groups"]}
            for key, tensor in tensors.items():
                group, _, name = key.partition(BETWEEN)
                groups[group][name] = tensor
            return StudyMessage(groups, facts["facts"])

    def settle(self, request: StudyMessage, reply: StudyMessage, what: str, charges: Sequence[Charge]) -> None:
        """Write the answer, in the place of the last one of its kind, and enter it: when this returns, it may leave.
        Raises Refused when nothing is left."""
        own = {"request": digest_of(request), "attempt": self.attempt, "groups": list(reply.groups)}
        save_tensors(self._path(request), flat(reply.groups), {**own, "facts": reply.facts})
        self._tell_hospital(charges)
        # The last thing before sending: a death in between counts an answer that did not leave.
        self.ledger.charge(self.study, what, self.attempt, charges)

    def _path(self, request: StudyMessage) -> Path:
        return self.folder / ANSWER_FILES.replace("*", str(request.facts["task"]))

    def _tell_hospital(self, charges: Sequence[Charge]) -> None:
        """Write how much is spent, these charges included, beside the site's results, for its own report.

        It never leaves the site.
        """
        standing, added = self.ledger.standing(), counted(charges)
        delta = self.study.demands.delta if self.study.demands else 1e-5
        study, spent = standing.of(self.study.name) + added, standing.charged + added
        said = Spent(
            study=finite(epsilon_of(study, delta)),
            all_studies=finite(epsilon_of(spent, delta)),
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

    def __init__(self, inner: Site, account: PrivacyAccount, participant: Participant) -> None:
        self.inner, self.account, self.participant = inner, account, participant
        account.ledger.plan(account.study, self.planned())
        participant.state.counts = account.counts

    def answer(self, parcel: StudyMessage, stop: Stop) -> StudyMessage:
        """Answer, and send the head of the ledger along, so that the server notices when an old copy is restored.

        The heads that the server sends back are not part of the request: a repeated request is the same with or without
        them.
        """
        asked, ledger = Request.received(parcel.facts), self.account.ledger
        ledger.check_heads([head.model_dump() for head in asked.ledgers])
        facts = {name: value for name, value in parcel.facts.items() if name != "ledgers"}
        reply = self._charged(StudyMessage(parcel.groups, facts), asked, stop)
        return replace(reply, facts={**reply.facts, "ledger": ledger.signed_head()})

    def _charged(self, parcel: StudyMessage, asked: Request, stop: Stop) -> StudyMessage:
        if reply := self.account.again(parcel):
            return reply
        state, own, account = self.participant.state, (asked.task, asked.round), self.account
        charges = [*self._trained(*own), *self._numbers.charges(*own), *self._beside(*own)]
        account.ledger.afford(account.study, charges)
        state.attempt = account.begin()
        reply = self.inner.answer(parcel, stop)
        if self._numbers.counted:
            drawn = self._numbers.counted[0]  # once, and part of every answer
            account.ledger.charge(account.study, "numbers of cases", drawn, self._numbers.count_charges)
        done, state.done = state.done, -1  # unless it is charged, it does not leave, and its state is void
        what = f"{asked.task} {asked.round}" if asked.task == "round" else asked.task
        account.settle(parcel, reply, what, charges)
        state.done = done
        return reply

    def planned(self) -> list[Charge]:
        """Return what all answers of the study cost."""
        rounds = [("round", number) for number in range(1, self.participant.place.plan.rounds + 1)]
        asked = [("join", 0), *rounds, ("deliver", 0), ("test", 0)]
        trained = (charge for own in rounds for charge in self._trained(*own))
        return [*trained, *self._numbers.planned(), *(charge for own in asked for charge in self._beside(*own))]

    @property
    def _numbers(self) -> PrivateNumbers:
        assert self.participant.disclosure.numbers
        return self.participant.disclosure.numbers

    def _beside(self, task: str, number: int) -> list[Charge]:
        """Return what the plan's layers charge for an answer."""
        layers = self.participant.place.plan.layers
        return [Charge.normal(*told) for layer in layers for told in layer.charges(task, number).items()]

    def _trained(self, task: str, number: int) -> list[Charge]:
        """Return what training costs; a hospital that does not train pays for its numbers alone."""
        private, phase_of = self.participant.trainer.private, self.participant.place.plan.course.phase_of
        return private.charges(number, phase_of(number)) if private and task == "round" else []
